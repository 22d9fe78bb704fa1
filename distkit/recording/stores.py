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
from distkit.recording.pending import Pending, hook, is_limit
from distkit.recording.recorder import MACHINERY, Recorder, user_line

#: The methods of a store that wait for keys, and the methods that set keys.
_WAITS = ("get", "wait", "multi_get")
_SETS = ("set", "add", "append", "compare_set", "multi_set", "queue_push")

#: A function that records the start of a call, as the tap does.
RecordStart = Callable[[Recorder, Pending, list[Any], float], None]


class Stores:
    """The hooks of ``dist.Store``."""

    def __init__(self, record_start: RecordStart) -> None:
        self._record_start = record_start
        self._inside = threading.local()  # marks a call that is being recorded

    def install(self, undo: ExitStack) -> None:
        """Hook the methods of stores until ``undo`` is closed."""
        for name in (*_WAITS, *_SETS):
            hook(undo, dist.Store, name, partial(self._hook, name))

    def _hook(
        self, name: str, method: Callable[..., Any], store: Any, *args: Any, **kwargs: Any
    ) -> Any:
        recorder, caller = _recorder.current(), sys._getframe(2).f_code.co_filename
        if recorder is None or self._is_internal(recorder, caller):
            return method(store, *args, **kwargs)
        self._inside.call = True
        try:
            return self._call(recorder, name, method, store, args, kwargs)
        finally:
            self._inside.call = False

    def _is_internal(self, recorder: Recorder, caller: str) -> bool:
        """Return whether another recorded call, or a wrapping store, makes the call."""
        within = getattr(self._inside, "call", False) or threading.get_ident() in recorder.waits
        return within or caller == c10d.__file__ or caller.startswith(MACHINERY)

    def _call(
        self,
        recorder: Recorder,
        name: str,
        method: Callable[..., Any],
        store: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        arguments = (*args, *kwargs.values())
        keys = arguments[:1] if arguments and isinstance(arguments[0], str) else tuple(arguments[0])
        facts = {"method": name, "keys": tuple(keys)}
        waits = name in _WAITS
        fields = (None, WORLD, 0, (), "", None, user_line(3), facts, None)
        op = Op.STORE_WAIT if waits else Op.STORE_SET
        pending = Pending(recorder, recorder.next_seq(), op, fields, [], False)
        self._record_start(recorder, pending, [], time.monotonic())
        with pending.waiting():
            if waits:
                limit = next(
                    (arg for arg in arguments if isinstance(arg, timedelta)), store.timeout
                )
                recorder.begin_wait(pending, limited=is_limit(limit))
            result = method(store, *args, **kwargs)
        pending.complete()
        return result
