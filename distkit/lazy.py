"""The public names of a package that are imported when they are first used."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Mapping
from typing import Any

from distkit.gone import GONE


def attributes(
    package: str, homes: Mapping[str, str], modules: Collection[str] = ()
) -> Callable[[str], Any]:
    """Make the ``__getattr__`` of a package.

    Args:
        package: its name.
        homes: the module of each public name.
        modules: those of its modules that are public names themselves.
    """

    def get(name: str) -> Any:
        if name in homes:
            return getattr(importlib.import_module(homes[name]), name)
        if name in modules:
            return importlib.import_module(f"{package}.{name}")
        raise AttributeError(
            GONE.get(f"{package}.{name}", f"module {package!r} has no attribute {name!r}")
        )

    return get
