"""Black box: a rank's latest events in a small file that survives a crash.

Events leave a rank some milliseconds after they happen, so a process that aborts would lose its
last ones. A copy of each event is written to a memory-mapped ring buffer.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any

import msgspec

from distkit.events import Op, State
from distkit.recording.plain import decode, encode

#: Number of events kept, and bytes per event; longer ones are skipped.
SLOTS, SIZE = 256, 512

#: Raised by an incomplete entry: the process ended while writing it.
DECODE_ERRORS = (ValueError, IndexError, struct.error, msgspec.MsgspecError)

#: Run, number of the event in it (from 1), and length of the row that follows, without values.
_HEAD = struct.Struct("<QQI")


class BlackBox:
    """Ring buffer of a rank's latest events, in a memory-mapped file.

    Args:
        path: the file to create.
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
    """Return the rows of a run that follow its first ``after``, as far as they are still there."""
    found = []
    for at in range(0, len(memory), SIZE):
        entry_run, number, size = _HEAD.unpack_from(memory, at)
        if entry_run == run and number > after:
            begin = at + _HEAD.size
            seq, op, state, *rest = decode(memory[begin : begin + size])
            found.append((number, (seq, Op(op), State(state), *rest)))
    return [row for _, row in sorted(found)]
