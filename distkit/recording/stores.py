"""Recording of ``dist.Store``, whose calls do not pass through ``c10d`` operators.

``store.get``, ``wait`` and ``multi_get`` block until another rank has set a key, so they can hang
like a receive.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from distkit.events import WORLD, Op
from distkit.recording import recorder as _recorder
from distkit.recording.pending import Pending, hook, is_user_timeout, waiting
from distkit.recording.recorder import MACHINERY, Recorder, user_line

#: The methods of a store that wait for keys, and the methods that set keys.
_WAITS = ("get", "wait", "multi_get")
_SETS = ("set", "add", "append", "compare_set", "multi_set", "queue_push")

#: A function that records the start of a call, as the tap does.
RecordStart = Callable[[Recorder, Pending, list[Any], float], None]


def install(undo: ExitStack, record_start: RecordStart) -> None:
    """Hook the methods of stores until ``undo`` is closed."""
    for name in (*_WAITS, *_SETS):
        hook(undo, dist.Store, name, partial(_call, record_start, name))


def _call(
    record_start: RecordStart,
    name: str,
    method: Callable[..., Any],
    store: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Record a call, unless another recorded call, a wrapping store or a library makes it."""
    recorder, caller = _recorder.current(), sys._getframe(2).f_code.co_filename
    is_internal = caller.startswith((c10d.__file__, *MACHINERY))
    if recorder is None or is_internal or threading.get_ident() in recorder.waits:
        return method(store, *args, **kwargs)
    arguments = (*args, *kwargs.values())
    keys = arguments[:1] if arguments and isinstance(arguments[0], str) else tuple(arguments[0])
    facts = {"method": name, "keys": tuple(keys)}
    fields = (None, WORLD, 0, (), "", None, user_line(2), facts, None)
    op = Op.STORE_WAIT if name in _WAITS else Op.STORE_SET
    pending = Pending(recorder, recorder.next_seq(), op, fields, [], False)
    record_start(recorder, pending, [], time.monotonic())
    limit = next((arg for arg in arguments if isinstance(arg, timedelta)), store.timeout)
    with waiting(pending, limited=is_user_timeout(limit)):
        result = method(store, *args, **kwargs)
    pending.complete()
    return result
