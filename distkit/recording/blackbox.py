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

#: Run and number of the event in the run (from 1); the event's seq, indices of its operation and
#: state, and time; and length of its shared fields, which follow.
_HEAD = struct.Struct("<QQqBBdI")
_OPS, _STATES = list(Op), list(State)
_INDEX = {member: index for members in (_OPS, _STATES) for index, member in enumerate(members)}

#: Maximum number of packed fields kept in memory.
_MAX_PACKED = 100


class BlackBox:
    """A ring buffer of a rank's latest events, in a memory-mapped file.

    Args:
        path: the file to create.
    """

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(SLOTS * SIZE))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), SLOTS * SIZE)
        # by id: shared fields with their packed form, which is the costly part of an entry
        self._packed: dict[int, tuple[Any, bytes]] = {}

    def note(self, run: int, number: int, row: tuple[Any, ...]) -> None:
        """Store an event's row without its values; ``number`` counts from 1 in each run."""
        seq, op, state, at, fields, _ = row
        packed = self._packed.get(id(fields))
        if packed is None:
            if len(self._packed) >= _MAX_PACKED:
                self._packed.clear()
            packed = self._packed[id(fields)] = fields, encode(fields)
        entry = (
            _HEAD.pack(run, number, seq, _INDEX[op], _INDEX[state], at, len(packed[1])) + packed[1]
        )
        if len(entry) <= SIZE:
            offset = number % SLOTS * SIZE
            self._memory[offset : offset + len(entry)] = entry


def rows_in(memory: bytes, run: int, after: int) -> list[tuple[Any, ...]]:
    """Return the rows of a run after its first ``after`` rows, unless overwritten."""
    rows = []
    for offset in range(0, len(memory), SIZE):
        entry_run, number, seq, op, state, at, size = _HEAD.unpack_from(memory, offset)
        if entry_run == run and number > after:
            begin = offset + _HEAD.size
            fields = decode(memory[begin : begin + size])
            rows.append((number, (seq, _OPS[op], _STATES[state], at, fields, None)))
    return [row for _, row in sorted(rows)]
