"""Encoding of plain values as msgpack. Decoding never executes code, even on untrusted data."""

from __future__ import annotations

from numbers import Integral, Real
from typing import Any

import msgspec

from distkit.events import Op, State

#: An event in transit: seq, operation, state and time; the fields that all events of an operation
#: share (``peer`` through ``match``), as a tuple; and the summary as a plain tuple.
Row = tuple[Any, ...]

#: The summary of a tensor's values.
Values = tuple[tuple[float, ...], float, float, float, int, bool]
#: The fields that all events of an operation share (``peer`` through ``match``).
_Fields = tuple[int | None, str, int, tuple[int, ...], str, int | None, str, Any, str | None]
#: A row with an index in place of its shared fields.
_PackedRow = tuple[int, Op, State, float, int, Values | None]


def _builtin(value: Any) -> Any:
    """Convert NumPy scalars to Python numbers, and any other object to text."""
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

    NumPy scalars become Python numbers. Any other object, and any integer of more than 64 bits,
    becomes text.
    """
    try:
        return _pack(value)
    except (UnicodeEncodeError, OverflowError):
        return _pack(_encodable(value))


def _encodable(value: Any) -> Any:
    """Replace lone surrogates, which file names may contain, and integers beyond 64 bits."""
    match value:
        case str():
            return value.encode(errors="backslashreplace").decode()
        case int() if not -(1 << 63) <= value < 1 << 64:
            return str(value)
        case list() | tuple():
            return [*map(_encodable, value)]
        case dict():
            return {_encodable(key): _encodable(item) for key, item in value.items()}
    return value


def decode(packed: Any) -> Any:
    """Unpack a value, with tuples for lists.

    Raises:
        msgspec.DecodeError: the bytes are not msgpack.
    """
    return _tuples(msgspec.msgpack.decode(packed))


def _tuples(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(map(_tuples, value))
    if isinstance(value, dict):
        return {name: _tuples(item) for name, item in value.items()}
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
    known = [(*begin, _tuples(facts), match) for *begin, facts, match in fields]
    return [(*row[:4], known[row[4]], row[5]) for row in rows]
