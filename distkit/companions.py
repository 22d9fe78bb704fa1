"""Companion packages, which distkit imports lazily for some of its public names.

Companions import distkit like any program; distkit imports companions only through :func:`load`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from distkit.errors import CompanionError


def load(module: str) -> ModuleType:
    """Import a module of distkit or of a companion.

    Raises:
        CompanionError: the companion is not installed.

    Example:
        >>> load("distkit_experiments").Experiment.__name__
        'Experiment'
    """
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if package == "distkit" or error.name != package:
            raise
        raise CompanionError(
            f"{package} is not installed. It is part of distkit: run 'python -m pip install "
            "--force-reinstall distkit', or in a checkout 'python -m pip install --editable .'."
        ) from None


def attributes(
    package: str,
    homes: Mapping[str, str],
    modules: Mapping[str, str] | None = None,
) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a package that imports its public names on first use.

    Args:
        package: the name of the package.
        homes: the module of each public name.
        modules: the full name of each public name that is a module.
    """

    def get(name: str) -> Any:
        if name in homes:
            return getattr(load(homes[name]), name)
        if modules and name in modules:
            return load(modules[name])
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return get
