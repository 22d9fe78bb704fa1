"""The black box: a rank's latest events in a small file that outlives a crash.

Events leave a rank some milliseconds after they happen; of a process that aborts, the most
interesting ones would be lost. A copy of each goes into a memory-mapped ring: a write to memory.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any

import msgspec

from distkit.events import Op, State
from distkit.recording.plain import decode, encode

#: So many events are kept, each in so many bytes (longer ones are left out).
SLOTS, SIZE = 256, 512

#: The errors of a damaged box: the process ended while it wrote an entry.
DAMAGED = (ValueError, IndexError, struct.error, msgspec.MsgspecError)

#: The run, the event's number in it from 1, and the bytes that follow: the row without values.
_HEAD = struct.Struct("<QQI")


class BlackBox:
    """Writes the latest events of a rank into a file.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(SLOTS * SIZE))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), SLOTS * SIZE)

    def note(self, run: int, number: int, row: tuple[Any, ...]) -> None:
        """Keep an event's row; ``number`` counts from 1 in each run."""
        body = encode((*row[:-1], None))
        entry = _HEAD.pack(run, number, len(body)) + body
        if len(entry) <= SIZE:
            at = number % SLOTS * SIZE
            self._memory[at : at + len(entry)] = entry


def rows_in(memory: bytes, run: int, after: int) -> list[tuple[Any, ...]]:
    """The rows of a run beyond the first ``after``, as far as a box's content still has them."""
    found = []
    for at in range(0, len(memory), SIZE):
        which, number, size = _HEAD.unpack_from(memory, at)
        if which == run and number > after:
            begin = at + _HEAD.size
            seq, op, state, *rest = decode(memory[begin : begin + size])
            found.append((number, (seq, Op(op), State(state), *rest)))
    return [row for _, row in sorted(found)]
