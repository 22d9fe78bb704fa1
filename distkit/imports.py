"""Lazy imports of public names and companions, and detection of files that shadow modules.

Companions import distkit as any other program does. distkit imports companions only through
:func:`load`.

With a ``random.py`` next to a notebook, ``import random`` imports that file. Python's error names
the missing attribute, not the wrong file. :func:`check` detects such a file. Python would also put
the notebook's folder first on the path of distkit's own processes, such as the fork server.
:func:`python_command` sets their path to the library folders and distkit's own folders.
"""

from __future__ import annotations

import importlib
import sys
import sysconfig
from collections.abc import Callable, Iterable, Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from distkit.errors import CompanionError

#: A folder with one of these packages counts as a library folder, even without metadata.
_TYPICAL_PACKAGES = ("torch", "numpy", "ipyparallel")

#: The program that distkit's own processes run; it sets the path before it imports anything else.
_PROGRAM = (
    "import sys; sys.path[:] = sys.argv[1].split('\\n'); "
    "from distkit.imports import call_target; call_target(*sys.argv[2:])"
)


def load(module: str) -> ModuleType:
    """Import a module from distkit or a companion.

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
    exports: Mapping[str, str],
    modules: Mapping[str, str] | None = None,
) -> Callable[[str], Any]:
    """Return a ``__getattr__`` for a package, which imports public names on first use.

    Args:
        package: the name of the package.
        exports: the module of each public name.
        modules: the full name of each public name that is a module.
    """

    def get(name: str) -> Any:
        if name in exports:
            return getattr(load(exports[name]), name)
        if modules and name in modules:
            return load(modules[name])
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return get


# -- shadowed modules ------------------------------------------------------------------------------


def check(*names: str) -> None:
    """Check that importing these modules would not import a user's file instead.

    Raises:
        ImportError: a user's file shadows a module.
    """
    for name in names:
        if name not in sys.modules and (spec := PathFinder.find_spec(name)) is not None:
            library = PathFinder.find_spec(name, libraries(sys.path))
            if library is None or None in (spec.origin, library.origin):
                continue
            if Path(str(spec.origin)).resolve() != Path(str(library.origin)).resolve():
                kind = "Python's module" if name in sys.stdlib_module_names else "the package"
                raise ImportError(
                    f"{spec.origin} has the same name as {kind} {name} and shadows it: rename the "
                    "file.",
                    name=name,
                    path=spec.origin,
                )


def libraries(path: Iterable[str]) -> list[str]:
    """Return the library folders of a module search path, the standard library first.

    Args:
        path: a search path such as ``sys.path``. Relative entries, which refer to the user's
            folder, are omitted.
    """
    entries = [entry for entry in dict.fromkeys(path) if Path(entry).is_absolute()]
    folders = sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")
    standard = [entry for entry in entries if entry.startswith(folders)]
    return standard + [e for e in entries if e not in standard and _has_packages(Path(e))]


def _has_packages(folder: Path) -> bool:
    if next(folder.glob("*.dist-info"), None) or next(folder.glob("*.egg-info"), None):
        return True
    return any(Path(folder, name, "__init__.py").exists() for name in _TYPICAL_PACKAGES)


# -- processes -------------------------------------------------------------------------------------


def python_command(target: str, *arguments: object) -> list[str]:
    """Return a command that calls ``target`` ("module:function") with these arguments as text."""
    root, path = Path(__file__).parents[1], libraries(sys.path)
    sources = [str(folder) for folder in (root, root / "companions") if folder.is_dir()]
    path = [folder for folder in sources if folder not in path] + path
    return [sys.executable, "-c", _PROGRAM, "\n".join(path), target, *map(str, arguments)]


def call_target(target: str, *arguments: object, **options: object) -> None:
    """Call ``target`` ("module:function"), or only import it ("module")."""
    name, _, function = target.partition(":")
    module = importlib.import_module(name)
    if function:
        getattr(module, function)(*arguments, **options)
