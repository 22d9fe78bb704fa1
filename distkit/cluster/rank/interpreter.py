"""What a program finds in its rank's interpreter: scripts, launchers, and child processes.

Processes that a program starts are no ranks, and find what a child of a plain Python process
would: ``multiprocessing.Pool`` ends its processes by SIGTERM, a DataLoader's workers print.
"""

from __future__ import annotations

import argparse
import asyncio
import builtins
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from importlib.machinery import SourceFileLoader
from multiprocessing.reduction import ForkingPickler
from operator import attrgetter
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import cloudpickle
import torch

from distkit.cluster.rank import outbox
from distkit.diagnosis.advice import STARTS_ITS_OWN
from distkit.recording import recorder
from distkit.recording.tap import tap

#: Whose signal handlers a child goes without; those of the program are inherited, as ever.
_OURS = ("distkit.", "ipyparallel.", "ipykernel.")


def run_script(path: Path, argv: Iterable[str]) -> None:
    """Run a file as Python does: as ``__main__``, with its arguments."""
    sys.argv[:] = [str(path), *argv]
    sys.path.insert(0, str(path.resolve().parent))
    main = ModuleType("__main__")
    vars(main).update(
        __file__=str(path),
        __cached__=None,
        __builtins__=builtins,
        __loader__=SourceFileLoader("__main__", str(path)),
    )
    sys.modules["__main__"] = main
    try:
        exec(compile(path.read_bytes(), str(path), "exec"), vars(main))
    except SystemExit as end:  # scripts like to end with sys.exit(main())
        if end.code not in (None, 0):
            raise


@contextmanager
def outside_of_loops() -> Iterator[None]:
    """Hide the engine's event loop from the function, which may run its own."""
    loop, policy = asyncio._get_running_loop(), asyncio.get_event_loop_policy()
    asyncio._set_running_loop(None)
    asyncio.set_event_loop_policy(None)
    try:
        yield
    finally:
        asyncio.set_event_loop_policy(policy)
        asyncio._set_running_loop(loop)


_ARGUMENTS = (
    "Give a script its arguments after its name: cluster.run('train.py', '--lr', '0.1'). "
    "A function takes them as parameters: cluster.run(train, lr=0.1)."
)


def explain_launchers(rank: int) -> None:
    """Say at once what comes of ``torch.multiprocessing.spawn`` on a rank, which may hang."""
    spawning = sys.modules["torch.multiprocessing.spawn"]
    stock = spawning.start_processes

    def start_processes(*args: Any, **options: Any) -> Any:
        if rank == 0:
            print(f"torch.multiprocessing.spawn: {STARTS_ITS_OWN}", file=sys.stderr)
        return stock(*args, **options)

    for module in (spawning, torch.multiprocessing):
        module.start_processes = start_processes  # type: ignore[attr-defined]


def called(error: BaseException) -> list[tuple[str, int, str, str | None]]:
    """The frame of the function that a rank could not call: where it is defined."""
    for frame, _ in [*traceback.walk_tb(error.__traceback__)][-1:]:
        code = getattr(frame.f_locals.get("fn"), "__code__", None)
        if frame.f_code.co_name == "_call" and code is not None:
            return [(code.co_filename, code.co_firstlineno, code.co_name, None)]
    return []


def hint(error: BaseException) -> str:
    """A remedy to add to an error: of a wrong call, or of a parser."""
    if isinstance(error, TypeError):
        calls = [f"cluster.run({f}, x) calls {f}(x) on every rank." for *_, f, _ in called(error)]
        return "".join(f"\n{said}" for said in calls)
    if isinstance(error, SystemExit):
        for frame, _ in [*traceback.walk_tb(error.__traceback__)][-1:]:
            if frame.f_code is argparse.ArgumentParser.exit.__code__:
                with suppress(Exception):  # a parser of the user's
                    usage = frame.f_locals["self"].format_usage()
                    return f"\n{usage}{frame.f_locals['message']}{_ARGUMENTS}"
    return ""


# -- processes that the program starts ----------------------------------------------------


def look_after_children(forget: Callable[[], None]) -> None:
    """From now on, have every process that this one forks forget that it was a rank.

    ``forget`` is called in each of them, at last.
    """
    os.register_at_fork(after_in_child=partial(_forget, forget))
    ForkingPickler.reducer_override = _reduce  # type: ignore[method-assign]


def _reduce(pickler: Any, thing: Any) -> Any:
    """Send functions and classes of a notebook by value: no module has them to import."""
    if not isinstance(thing, FunctionType | type) or _importable(thing):
        return NotImplemented
    return cloudpickle.loads, (cloudpickle.dumps(thing),)


def _importable(thing: FunctionType | type) -> bool:
    try:
        return attrgetter(thing.__qualname__)(sys.modules[thing.__module__]) is thing
    except (AttributeError, KeyError):
        return False


def _forget(forget: Callable[[], None]) -> None:
    for number in signal.valid_signals():
        handler = signal.getsignal(number)
        if (getattr(handler, "__module__", None) or "").startswith(_OURS):
            default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            signal.signal(number, default)
    outbox.in_child()
    recorder.set_current(None)
    tap.before.clear()
    tap.groups.on_group = None
    forget()
