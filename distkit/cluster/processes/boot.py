"""Starts distkit's own processes, such as the one that ranks are forked from.

Python would put the notebook's folder first on their path, where a user's ``random.py`` would hide
the standard library's. Their path has only library folders, and the folder of this distkit.
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


def command(run: str, *arguments: object) -> list[str]:
    """Return the command that calls ``run`` ("module:function") with these arguments, as text."""
    root, path = Path(__file__).parents[3], libraries(sys.path)
    own = [str(folder) for folder in (root, root / "companions") if folder.is_dir()]
    path = [folder for folder in own if folder not in path] + path
    return [sys.executable, "-c", _PROGRAM, "\n".join(path), run, *map(str, arguments)]


def call(run: str, *arguments: object, **options: object) -> None:
    """Call ``run`` ("module:function"), or only import it ("module")."""
    name, _, function = run.partition(":")
    module = import_module(name)
    if function:
        getattr(module, function)(*arguments, **options)
