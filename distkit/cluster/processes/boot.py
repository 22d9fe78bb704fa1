"""Starts distkit's own processes, such as the one that ranks are forked from.

Python would put the notebook's folder first on their path, where a user's ``random.py`` would hide
the standard library's. Their path contains only library folders and the folder of this distkit.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

from distkit.shadowing import libraries

#: The program of these processes; it sets the path before it imports anything else.
_PROGRAM = (
    "import sys; sys.path[:] = sys.argv[1].split('\\n'); "
    "from distkit.cluster.processes.boot import call; call(*sys.argv[2:])"
)


def command(target: str, *arguments: object) -> list[str]:
    """Return a command that calls ``target`` ("module:function"), with its arguments as text."""
    root, path = Path(__file__).parents[3], libraries(sys.path)
    own = [str(folder) for folder in (root, root / "companions") if folder.is_dir()]
    path = [folder for folder in own if folder not in path] + path
    return [sys.executable, "-c", _PROGRAM, "\n".join(path), target, *map(str, arguments)]


def call(target: str, *arguments: object, **options: object) -> None:
    """Call ``target`` ("module:function"), or only import it ("module")."""
    name, _, function = target.partition(":")
    module = import_module(name)
    if function:
        getattr(module, function)(*arguments, **options)
