"""Detection of user files that shadow a module.

With a ``random.py`` next to a notebook, ``import random`` imports that file. Python's error names
the missing attribute, not the wrong file.
"""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Iterable
from importlib.machinery import PathFinder
from pathlib import Path

#: A folder with one of these packages counts as a library folder, even without metadata.
_TYPICAL_PACKAGES = ("torch", "numpy", "ipyparallel")


def libraries(path: Iterable[str]) -> list[str]:
    """Return the library folders of a module search path, the standard library first.

    Args:
        path: a search path such as ``sys.path``; relative entries are the user's folder.
    """
    entries = [entry for entry in dict.fromkeys(path) if Path(entry).is_absolute()]
    standard = [entry for entry in entries if _is_standard_library(entry)]
    return standard + [e for e in entries if e not in standard and _has_packages(Path(e))]


def _is_standard_library(entry: str) -> bool:
    """Return whether an entry is the standard library, its zip file or its compiled modules."""
    folders = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
    zipped = f"python{sys.version_info.major}{sys.version_info.minor}.zip"
    return entry in folders or Path(entry).name in (zipped, "lib-dynload")


def _has_packages(folder: Path) -> bool:
    if next(folder.glob("*.dist-info"), None) or next(folder.glob("*.egg-info"), None):
        return True
    return any(Path(folder, name, "__init__.py").exists() for name in _TYPICAL_PACKAGES)


def check(*names: str) -> None:
    """Check that importing these modules would not import a user's file instead.

    Raises:
        ImportError: a user's file shadows a module.
    """
    for name in names:
        if name not in sys.modules and (spec := PathFinder.find_spec(name)) is not None:
            hidden = PathFinder.find_spec(name, libraries(sys.path))
            if hidden is None or None in (spec.origin, hidden.origin):
                continue
            if Path(str(spec.origin)).resolve() != Path(str(hidden.origin)).resolve():
                kind = "Python's module" if name in sys.stdlib_module_names else "the package"
                raise ImportError(
                    f"{spec.origin} has the same name as {kind} {name} and shadows it: rename the "
                    "file.",
                    name=name,
                    path=spec.origin,
                )
