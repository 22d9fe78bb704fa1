"""An operation between its call and its end."""

from __future__ import annotations

import threading
import time
from typing import Any

import torch

from distkit.events import Op, State
from distkit.recording.recorder import Recorder


class Pending:
    """A started operation: completes once, by ``wait`` or by its future, whichever is first."""

    __slots__ = ("_lock", "done", "fields", "look", "op", "outputs", "recorder", "seq")

    def __init__(
        self,
        recorder: Recorder,
        seq: int,
        op: Op,
        fields: tuple[Any, ...],
        outputs: list[torch.Tensor],
        look: bool,
    ) -> None:
        self.recorder, self.seq, self.op, self.fields = recorder, seq, op, fields
        self.outputs, self.look = outputs, look
        self._lock, self.done = threading.Lock(), False

    def complete(self, peer: int | None = None) -> None:
        """Note that it is done; ``peer`` is who sent, where that was open."""
        now = time.monotonic()  # before looking at the values, which takes a while
        with self._lock:
            if self.done:
                return
            self.done = True
            fields = self.fields if peer is None else (peer, *self.fields[1:])
            values = self.recorder.look(*self.outputs) if self.look else None
            self.recorder.put(self.seq, self.op, State.COMPLETED, now, fields, values)

    def fail(self) -> None:
        """Note that it ended with an error."""
        with self._lock:
            if not self.done:
                self.done = True
                now = time.monotonic()
                self.recorder.put(self.seq, self.op, State.FAILED, now, self.fields)

    @property
    def sender(self) -> tuple[int | None, str]:
        """The peer as far as it is known, and the group."""
        return self.fields[0], self.fields[1]
