"""A file of the reader's that has the name of a module: Python finds it first, and hides the other.

``random.py`` beside a notebook is what ``import random`` finds there. Python's own complaint names
what is missing in it, not that it is the wrong file.
"""

from __future__ import annotations

import sys
import sysconfig
import types
from collections.abc import Iterable
from importlib.machinery import PathFinder
from pathlib import Path

#: A folder with one of these packages is one of libraries, if nothing says that it was installed.
_NEEDED = ("torch", "numpy", "ipyparallel")


def libraries(path: Iterable[str]) -> list[str]:
    """The entries of a module search path that hold libraries, Python's own first.

    Args:
        path: such as ``sys.path``; relative entries are the reader's folder.
    """
    entries = [entry for entry in dict.fromkeys(path) if Path(entry).is_absolute()]
    own = [entry for entry in entries if _is_pythons(entry)]
    return own + [e for e in entries if e not in own and _has_packages(Path(e))]


def _is_pythons(entry: str) -> bool:
    """True if the standard library is there, its compiled modules, or the zip file with it."""
    homes = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
    zipped = f"python{sys.version_info.major}{sys.version_info.minor}.zip"
    return entry in homes or Path(entry).name in (zipped, "lib-dynload")


def _has_packages(folder: Path) -> bool:
    if next(folder.glob("*.dist-info"), None) or next(folder.glob("*.egg-info"), None):
        return True
    return any(Path(folder, name, "__init__.py").exists() for name in _NEEDED)


def check(*names: str) -> None:
    """Look whether these modules, which are about to be imported, are the real ones.

    Raises:
        ImportError: a file of the reader's would be imported instead.
    """
    for name in names:
        if name not in sys.modules and (spec := PathFinder.find_spec(name)) is not None:
            said = _said(name, spec.origin)
            if said:
                raise ImportError(said, name=name, path=spec.origin)


def explain(error: BaseException) -> str:
    """The file that hides a module, if that is why something was not found in it; "" if not."""
    if type(error) not in (AttributeError, ImportError, ModuleNotFoundError):
        return ""  # the attributes of a class of the user's may do anything
    if isinstance(error, AttributeError):
        module = error.obj
        if not isinstance(module, types.ModuleType):
            return ""
        return _said(module.__name__, getattr(module, "__file__", None))
    if isinstance(error, ImportError) and error.name:
        name, _, inner = error.name.partition(".")  # numpy.linalg is missed in numpy.py
        loaded = getattr(sys.modules.get(name), "__file__", None)
        return _said(name, loaded if inner else error.path or loaded)
    return ""


def _said(name: str, file: str | None) -> str:
    """That this file hides the module of that name; "" if it is the module."""
    hidden = None if file is None else PathFinder.find_spec(name, libraries(sys.path))
    if hidden is None or hidden.origin is None or "." in name:
        return ""
    if Path(str(file)).resolve() == Path(hidden.origin).resolve():
        return ""
    kind = "Python's module" if name in sys.stdlib_module_names else "the package"
    return f"{file} has the name of {kind} {name} and hides it: rename the file."
