"""Prepares a rank's interpreter for programs: scripts, launchers, and child processes.

Processes that a program starts are not ranks. They must behave like children of a plain Python
process: ``multiprocessing.Pool`` ends them with SIGTERM, and a DataLoader's workers print.
"""

from __future__ import annotations

import argparse
import os
import runpy
import signal
import sys
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from multiprocessing.reduction import ForkingPickler
from operator import attrgetter
from pathlib import Path
from types import FunctionType
from typing import Any

import cloudpickle
import torch

from distkit.diagnosis.advice import OWN_PROCESSES
from distkit.recording import recorder
from distkit.recording.tap import tap

#: Modules whose signal handlers are removed in child processes, which inherit only the program's.
_OWN_MODULES = ("distkit.", "ipyparallel.", "ipykernel.")


def run_script(path: Path, argv: Iterable[str]) -> None:
    """Run a file as Python does: as ``__main__``, with its arguments."""
    sys.argv[:] = [str(path), *argv]
    sys.path.insert(0, str(path.resolve().parent))
    try:
        runpy.run_path(str(path), run_name="__main__")
    except SystemExit as end:  # scripts often end with sys.exit(main())
        if end.code not in (None, 0):
            raise


_ARGUMENTS_HINT = (
    "Pass a script's arguments after its name: cluster.run('train.py', '--lr', '0.1'). "
    "Pass a function's as parameters: cluster.run(train, lr=0.1)."
)


def explain_launchers(rank: int) -> None:
    """Print an explanation when a rank calls ``torch.multiprocessing.spawn``, which may hang."""
    spawning = sys.modules["torch.multiprocessing.spawn"]
    original = spawning.start_processes

    def start_processes(*args: Any, **options: Any) -> Any:
        if rank == 0:
            print(f"torch.multiprocessing.spawn: {OWN_PROCESSES}", file=sys.stderr)
        return original(*args, **options)

    for module in (spawning, torch.multiprocessing):
        module.start_processes = start_processes  # type: ignore[attr-defined]


def frame_of_call(error: BaseException) -> list[tuple[str, int, str, str | None]]:
    """Return the definition of the function that a rank could not call, as a frame."""
    for frame, _ in [*traceback.walk_tb(error.__traceback__)][-1:]:
        code = getattr(frame.f_locals.get("fn"), "__code__", None)
        if frame.f_code.co_name == "_call" and code is not None:
            return [(code.co_filename, code.co_firstlineno, code.co_name, None)]
    return []


def hint(error: BaseException) -> str:
    """Return a remedy for an error in a call or from an argument parser; else ""."""
    if isinstance(error, TypeError):
        functions = [name for *_, name, _ in frame_of_call(error)]
        return "".join(f"\ncluster.run({f}, x) calls {f}(x) on every rank." for f in functions)
    if isinstance(error, SystemExit):
        for frame, _ in [*traceback.walk_tb(error.__traceback__)][-1:]:
            if frame.f_code is argparse.ArgumentParser.exit.__code__:
                with suppress(Exception):  # the parser may be an instance of a user's subclass
                    usage = frame.f_locals["self"].format_usage()
                    return f"\n{usage}{frame.f_locals['message']}{_ARGUMENTS_HINT}"
    return ""


# -- processes that the program starts ----------------------------------------------------


def install_child_hooks(callback: Callable[[], None]) -> None:
    """Reset the rank's state in every process that this process forks later.

    ``callback`` is called last in each of them.
    """
    os.register_at_fork(after_in_child=partial(_reset_child, callback))
    ForkingPickler.reducer_override = _reduce  # type: ignore[method-assign]


def _reduce(pickler: Any, obj: Any) -> Any:
    """Pickle functions and classes of a notebook by value, since no module exports them."""
    if not isinstance(obj, FunctionType | type) or _is_importable(obj):
        return NotImplemented
    return cloudpickle.loads, (cloudpickle.dumps(obj),)


def _is_importable(obj: FunctionType | type) -> bool:
    try:
        return attrgetter(obj.__qualname__)(sys.modules[obj.__module__]) is obj
    except (AttributeError, KeyError):
        return False


def _reset_child(callback: Callable[[], None]) -> None:
    for number in signal.valid_signals():
        handler = signal.getsignal(number)
        if (getattr(handler, "__module__", None) or "").startswith(_OWN_MODULES):
            default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            signal.signal(number, default)
    recorder.set_current(None)
    tap.before.clear()
    tap.groups.on_group = None
    callback()
