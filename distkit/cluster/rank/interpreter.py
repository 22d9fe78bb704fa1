"""Prepares a rank's interpreter for programs: scripts and child processes.

Processes that a program starts are not ranks. They must behave like children of a plain Python
process: ``multiprocessing.Pool`` terminates them with SIGTERM, and a DataLoader's workers print.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from collections.abc import Iterable
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import FunctionType
from typing import Any

import cloudpickle

from distkit.recording import recorder
from distkit.recording.tap import tap


def run_script(path: Path, argv: Iterable[str]) -> None:
    """Run a file as Python does: as ``__main__``, with its arguments."""
    sys.argv[:] = [str(path), *argv]
    sys.path.insert(0, str(path.resolve().parent))
    try:
        runpy.run_path(str(path), run_name="__main__")
    except SystemExit as end:  # scripts often end with sys.exit(main())
        if end.code not in (None, 0):
            raise


# -- processes that the program starts ----------------------------------------------------


def install_child_hooks() -> None:
    """Reset the rank's state in every process that this process forks later."""
    os.register_at_fork(after_in_child=_reset_child)
    ForkingPickler.reducer_override = _reduce  # type: ignore[method-assign]


def _reduce(pickler: Any, obj: Any) -> Any:
    """Pickle functions and classes of a notebook by value, since no module exports them."""
    if not isinstance(obj, FunctionType | type):
        return NotImplemented
    return cloudpickle.loads, (cloudpickle.dumps(obj),)


def _reset_child() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # an engine handles it
    recorder.set_current(None)
    tap.before.clear()
