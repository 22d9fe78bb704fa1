"""The black box keeps a rank's latest events in a small file that survives a crash.

A rank sends events a few milliseconds after they happen, so an aborting process would lose its last
events. Each event is therefore also written to a memory-mapped ring buffer.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any

import msgspec

from distkit.events import Op, State
from distkit.recording.plain import decode, encode

#: Number of events kept, and maximum bytes per event; longer events are skipped.
SLOTS, SIZE = 256, 512

#: Errors raised when decoding an entry that is incomplete because its process exited.
DECODE_ERRORS = (ValueError, IndexError, struct.error, msgspec.MsgspecError)

#: Run, number of the event in the run (from 1), and length of the row that follows.
_HEAD = struct.Struct("<QQI")


class BlackBox:
    """A ring buffer of a rank's latest events, in a memory-mapped file.

    Args:
        path: the file to create.
    """

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(SLOTS * SIZE))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), SLOTS * SIZE)

    def note(self, run: int, number: int, row: tuple[Any, ...]) -> None:
        """Store an event's row without its values; ``number`` counts from 1 in each run."""
        body = encode((*row[:-1], None))
        entry = _HEAD.pack(run, number, len(body)) + body
        if len(entry) <= SIZE:
            offset = number % SLOTS * SIZE
            self._memory[offset : offset + len(entry)] = entry


def rows_in(memory: bytes, run: int, after: int) -> list[tuple[Any, ...]]:
    """Return the rows of a run after its first ``after`` rows, unless overwritten."""
    rows = []
    for offset in range(0, len(memory), SIZE):
        entry_run, number, size = _HEAD.unpack_from(memory, offset)
        if entry_run == run and number > after:
            begin = offset + _HEAD.size
            seq, op, state, *rest = decode(memory[begin : begin + size])
            rows.append((number, (seq, Op(op), State(state), *rest)))
    return [row for _, row in sorted(rows)]
