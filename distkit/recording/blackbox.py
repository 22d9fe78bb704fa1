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

#: The run, the event's number in it from 1, bytes that follow; seq, operation, state and time.
_HEAD = struct.Struct("<QQIqBBd")
_OPS, _STATES = list(Op), list(State)
_NUMBER_OF = {word: i for words in (_OPS, _STATES) for i, word in enumerate(words)}


class BlackBox:
    """Writes the latest events of a rank into a file.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(SLOTS * SIZE))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), SLOTS * SIZE)
        self._fields: tuple[tuple[Any, ...], bytes] = (), b""  # of the latest row, and packed

    def note(self, run: int, number: int, row: tuple[Any, ...]) -> None:
        """Keep an event's row; ``number`` counts from 1 in each run."""
        seq, op, state, when, fields, _ = row
        packed = self._fields
        if packed[0] is not fields:
            packed = self._fields = fields, encode(fields)
        body = packed[1]
        told = run, number, len(body), seq, _NUMBER_OF[op], _NUMBER_OF[state], when
        entry = _HEAD.pack(*told) + body
        if len(entry) <= SIZE:
            at = number % SLOTS * SIZE
            self._memory[at : at + len(entry)] = entry


def rows_in(memory: bytes, run: int, after: int) -> list[tuple[Any, ...]]:
    """The rows of a run beyond the first ``after``, as far as a box's content still has them."""
    found = []
    for at in range(0, len(memory), SIZE):
        which, number, size, seq, op, state, when = _HEAD.unpack_from(memory, at)
        if which == run and number > after:
            begin = at + _HEAD.size
            fields = decode(memory[begin : begin + size])
            found.append((number, (seq, _OPS[op], _STATES[state], when, fields, None)))
    return [row for _, row in sorted(found)]
