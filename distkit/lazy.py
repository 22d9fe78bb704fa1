"""The public names of a package that are imported when they are first used."""

from __future__ import annotations

import pkgutil
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from distkit.companions import load
from distkit.gone import GONE


def attributes(
    package: str,
    homes: Mapping[str, str],
    modules: Mapping[str, str] | None = None,
    former: Mapping[str, str] | None = None,
) -> Callable[[str], Any]:
    """Make the ``__getattr__`` of a package.

    Args:
        package: its name.
        homes: the module of each public name.
        modules: the public names that are modules themselves, and which.
        former: the module of each name that has moved, which warns.
    """
    modules, former = modules or {}, former or {}

    def get(name: str) -> Any:
        if name in homes:
            return getattr(load(homes[name]), name)
        if name in modules:
            return load(modules[name])
        if name in former:
            now = f"{former[name]}.{name}"
            warnings.warn(
                f"{package}.{name} has moved: write {now} instead.", DeprecationWarning, 2
            )
            return pkgutil.resolve_name(now)
        raise AttributeError(
            GONE.get(f"{package}.{name}", f"module {package!r} has no attribute {name!r}")
        )

    return get
