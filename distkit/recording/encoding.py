"""Encodes plain values and events as msgpack, and stores the latest events in the black box.

Decoding never executes code, even for untrusted data.

A rank buffers events for up to 0.1 s before it sends them, so an aborting process would lose its
last events. Events are therefore also written to the black box, a memory-mapped ring buffer.
"""

from __future__ import annotations

import mmap
import struct
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import msgspec

from distkit.events import Op, State

#: An event in transit: seq, operation, state, time, a tuple of its other fields (:data:`_Fields`),
#: and its summary (:data:`Values`).
Row = tuple[Any, ...]

#: The fields of a :class:`~distkit.events.Summary`.
Values = tuple[tuple[float, ...], float, float, float, int, bool]
#: The fields ``peer`` through ``match``; most events of an operation share one tuple.
_Fields = tuple[int | None, str, int, tuple[int, ...], str, int | None, str, Any, str | None]
#: A row with an index in place of its tuple of fields.
_PackedRow = tuple[int, Op, State, float, int, Values | None]


def _builtin(value: Any) -> Any:
    """Convert a NumPy scalar to a Python number and any other object to text."""
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    # numpy.bool is not registered as a number
    return bool(value) if type(value).__name__ in ("bool", "bool_") else str(value)


_pack = msgspec.msgpack.Encoder(enc_hook=_builtin).encode
_rows = msgspec.msgpack.Decoder(tuple[list[_Fields], list[_PackedRow]]).decode


def encode(value: Any) -> bytes:
    """Pack numbers, text, bytes, None, dataclasses, and lists, tuples and dicts of them.

    NumPy scalars become Python numbers. Any other object, and any integer that does not fit in
    64 bits, becomes text.
    """
    try:
        return _pack(value)
    except (UnicodeEncodeError, OverflowError):
        return _pack(_make_encodable(value))


def _make_encodable(value: Any) -> Any:
    """Replace lone surrogates, which file names may contain, and integers beyond 64 bits."""
    match value:
        case str():
            return value.encode(errors="backslashreplace").decode()
        case int() if not -(1 << 63) <= value < 1 << 64:
            return str(value)
        case list() | tuple():
            return [*map(_make_encodable, value)]
        case dict():
            return {_make_encodable(key): _make_encodable(item) for key, item in value.items()}
    return value


def decode(packed: Any) -> Any:
    """Unpack a value; its lists become tuples.

    Raises:
        msgspec.DecodeError: the bytes are not msgpack.
    """
    return _to_tuples(msgspec.msgpack.decode(packed))


def _to_tuples(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(map(_to_tuples, value))
    if isinstance(value, dict):
        return {name: _to_tuples(item) for name, item in value.items()}
    return value


def encode_rows(rows: list[Row]) -> bytes:
    """Pack events; fields that several events share are packed once."""
    numbers, fields, packed = dict[int, int](), list[Any](), []
    for *begin, shared, values in rows:
        number = numbers.get(id(shared))
        if number is None:
            number = numbers[id(shared)] = len(fields)
            fields.append(shared)
        packed.append((*begin, number, values))
    return encode((fields, packed))


def decode_rows(packed: bytes) -> list[Row]:
    """Unpack events.

    Raises:
        msgspec.DecodeError, IndexError: the bytes contain no events.
    """
    fields, rows = _rows(packed)
    shared = [(*begin, _to_tuples(attributes), match) for *begin, attributes, match in fields]
    return [(*row[:4], shared[row[4]], row[5]) for row in rows]


# -- the black box ---------------------------------------------------------------------------------

#: ``SLOTS``: number of events kept. ``SLOT_SIZE``: maximum size of an event [bytes]; larger events
#: are not stored.
SLOTS, SLOT_SIZE = 256, 512

#: Errors raised when decoding an entry that is incomplete because its process exited.
DECODE_ERRORS = (ValueError, IndexError, struct.error, msgspec.MsgspecError)

#: Head of an entry: the run, the event's number in the run (from 1), its seq, the indices of its
#: operation and state, its time, and the length of its shared fields, which follow.
_HEAD = struct.Struct("<QQqBBdI")
_OPS, _STATES = list(Op), list(State)
_INDEX = {member: index for members in (_OPS, _STATES) for index, member in enumerate(members)}

#: Maximum number of packed tuples of fields kept in memory.
_MAX_PACKED = 100


class BlackBox:
    """A ring buffer of a rank's latest events, in a memory-mapped file.

    Args:
        path: the file to create.
    """

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(SLOTS * SLOT_SIZE))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), SLOTS * SLOT_SIZE)
        # by id: shared fields with their packed form, which is costly to create
        self._packed_fields: dict[int, tuple[Any, bytes]] = {}

    def store(self, run: int, number: int, row: Row) -> None:
        """Store an event's row without its values; ``number`` counts from 1 in each run."""
        seq, op, state, time, fields, _ = row
        packed = self._packed_fields.get(id(fields))
        if packed is None:
            if len(self._packed_fields) >= _MAX_PACKED:
                self._packed_fields.clear()
            packed = self._packed_fields[id(fields)] = fields, encode(fields)
        entry = (
            _HEAD.pack(run, number, seq, _INDEX[op], _INDEX[state], time, len(packed[1]))
            + packed[1]
        )
        if len(entry) <= SLOT_SIZE:
            offset = number % SLOTS * SLOT_SIZE
            self._memory[offset : offset + len(entry)] = entry


def rows_in(memory: bytes, run: int, skip: int) -> list[Row]:
    """Return the stored rows of a run, except for its first ``skip`` rows."""
    rows = []
    for offset in range(0, len(memory), SLOT_SIZE):
        entry_run, number, seq, op, state, time, size = _HEAD.unpack_from(memory, offset)
        if entry_run == run and number > skip:
            begin = offset + _HEAD.size
            fields = decode(memory[begin : begin + size])
            rows.append((number, (seq, _OPS[op], _STATES[state], time, fields, None)))
    return [row for _, row in sorted(rows)]
