"""Children of a rank's program: what they must not inherit, since they are not ranks.

``multiprocessing.Pool`` ends its processes by SIGTERM, a DataLoader's workers print: both find
what they would find in a child of a plain Python process.
"""

from __future__ import annotations

import os
import signal
import sys
from functools import partial
from multiprocessing.reduction import ForkingPickler
from operator import attrgetter
from types import FunctionType
from typing import TYPE_CHECKING, Any

import cloudpickle

from distkit.cluster.rank import outbox
from distkit.recording import recorder
from distkit.recording.tap import tap

if TYPE_CHECKING:
    from distkit.cluster.rank.rank import Rank

#: Whose signal handlers a child goes without; those of the program are inherited, as ever.
_OURS = ("distkit.", "ipyparallel.", "ipykernel.")


def look_after(rank: Rank) -> None:
    """From now on, have every process that this one forks forget that it was a rank."""
    os.register_at_fork(after_in_child=partial(_forget, rank))
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


def _forget(rank: Rank) -> None:
    rank.lifeline._sock.close()  # only this end: the line is the rank's
    for number in signal.valid_signals():
        handler = signal.getsignal(number)
        if (getattr(handler, "__module__", None) or "").startswith(_OURS):
            default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            signal.signal(number, default)
    outbox.in_child()
    recorder.set_current(None)
    tap.before.clear()
    tap.groups.on_group = None
    rank.group.leave_user_calls()
