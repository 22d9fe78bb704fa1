"""The black box: a rank's latest events in a small file that outlives a crash.

Events leave a rank some milliseconds after they happen; of a process that aborts, the most
interesting ones would be lost. A copy of each goes into a memory-mapped ring: a write to memory.
"""

from __future__ import annotations

import marshal
import mmap
import struct
from pathlib import Path
from typing import Any

from distkit.events import Op, State

#: So many events are kept, each in so many bytes (longer ones are left out).
SLOTS, SIZE = 256, 512

_HEAD = struct.Struct("<QQI")  # the run, the event's number in it from 1, bytes that follow


class BlackBox:
    """Writes the latest events of a rank into a file."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(SLOTS * SIZE))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), SLOTS * SIZE)

    def note(self, run: int, number: int, row: tuple[Any, ...]) -> None:
        """Keep an event's row; ``number`` counts from 1 in each run."""
        seq, op, state, *rest = row[:-1]  # all but the summary
        body = marshal.dumps((seq, op.value, state.value, *rest))
        if len(body) > SIZE - _HEAD.size:
            return
        at = number % SLOTS * SIZE
        self._memory[at : at + _HEAD.size + len(body)] = _HEAD.pack(run, number, len(body)) + body


def read(path: Path, run: int, after: int) -> list[tuple[Any, ...]]:
    """The rows of a run beyond the first ``after``, as far as the box still has them."""
    memory = path.read_bytes()
    found = []
    for at in range(0, len(memory), SIZE):
        which, number, size = _HEAD.unpack_from(memory, at)
        if which == run and number > after:
            begin = at + _HEAD.size
            seq, op, state, *rest = marshal.loads(memory[begin : begin + size])
            found.append((number, (seq, Op(op), State(state), *rest, None)))
    return [row for _, row in sorted(found)]
