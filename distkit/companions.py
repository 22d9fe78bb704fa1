"""Companion packages, which distkit imports lazily for some of its public names.

Companions import distkit like any program; distkit imports companions only through :func:`load`.
"""

from __future__ import annotations

import importlib
import pkgutil
import warnings
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from distkit.errors import CompanionError
from distkit.gone import GONE


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
    former: Mapping[str, str] | None = None,
) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a package that imports its public names on first use.

    Args:
        package: the name of the package.
        homes: the module of each public name.
        modules: the full name of each public name that is a module.
        former: the new module of each name that has moved; using the name warns.
    """
    modules, former = modules or {}, former or {}

    def get(name: str) -> Any:
        if name in homes:
            return getattr(load(homes[name]), name)
        if name in modules:
            return load(modules[name])
        if name in former:
            target = f"{former[name]}.{name}"
            warnings.warn(
                f"{package}.{name} has moved: use {target} instead.", DeprecationWarning, 2
            )
            return pkgutil.resolve_name(target)
        raise AttributeError(
            GONE.get(f"{package}.{name}", f"module {package!r} has no attribute {name!r}")
        )

    return get
