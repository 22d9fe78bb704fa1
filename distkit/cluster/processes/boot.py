"""Entry point of distkit's own processes, such as the one that ranks are forked from.

It runs as a file, ``python boot.py MODULE:FUNCTION PATH ARGUMENT ...``, not as a module, because
Python would put the notebook's folder first on its path, where a user's ``random.py`` would hide
the standard library's.
"""

import sys


def command(run: str, *arguments: object) -> list[str]:
    """Return the command that calls ``run`` ("module:function") with these arguments, as text."""
    from distkit.shadowing import libraries

    path = "\n".join(libraries(sys.path))
    return [sys.executable, __file__, run, path, *map(str, arguments)]


def call(run: str, *arguments: str) -> None:
    """Call ``run`` ("module:function")."""
    from importlib import import_module

    module, _, function = run.partition(":")
    getattr(import_module(module), function)(*arguments)


def _find_package() -> None:
    """Import distkit from this file's package, not from another installation."""
    from importlib.util import module_from_spec, spec_from_file_location
    from pathlib import Path

    root = Path(__file__).resolve().parents[2]
    spec = spec_from_file_location(
        "distkit", root / "__init__.py", submodule_search_locations=[str(root)]
    )
    assert spec is not None and spec.loader is not None
    if (companions := root.parent / "companions").is_dir():  # of a checkout
        sys.path.append(str(companions))
    package = sys.modules["distkit"] = module_from_spec(spec)
    spec.loader.exec_module(package)


if __name__ == "__main__":
    _, run, path, *arguments = sys.argv
    sys.path[:] = path.split("\n")  # before anything else is imported
    _find_package()
    call(run, *arguments)
