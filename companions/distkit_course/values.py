"""Serialize the values of an answer, which its rank sends to the judge.

Unpacking does not execute code. 64-bit integers, floats, text, containers and tensors keep
their types. NumPy scalars become Python numbers, and any other object is replaced by its repr.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

_CONTAINERS = {kind.__name__: kind for kind in (tuple, set, frozenset)}
_DTYPES = {str(d): d for d in vars(torch).values() if isinstance(d, torch.dtype)}

#: Errors raised by :func:`unpack` for invalid bytes.
DECODE_ERRORS = (
    msgspec.MsgspecError,
    ValueError,
    TypeError,
    LookupError,
    RecursionError,
    RuntimeError,
)


@dataclass(frozen=True)
class OpaqueValue:
    """The repr of an object that cannot be packed."""

    text: str

    def __repr__(self) -> str:
        return self.text


def pack(value: Any) -> bytes:
    """Pack a value."""
    return msgspec.msgpack.encode(_plain(value))


def _plain(value: Any) -> Any:
    """Convert a value for msgpack; other types become a dict with the type as its only key."""
    match value:
        case None | bool():
            return value
        case np.generic():
            return _plain(value.item())
        case float():
            return float(value)
        case bytes():
            return bytes(value)
        case str():
            return value.encode(errors="backslashreplace").decode()  # escapes lone surrogates
        case int() if abs(value) < 1 << 63:
            return int(value)
        case list():
            return [*map(_plain, value)]
        case tuple() | set() | frozenset():
            kind = next(name for name, type_ in _CONTAINERS.items() if isinstance(value, type_))
            return {kind: [*map(_plain, value)]}
        case dict():
            return {"dict": [[_plain(key), _plain(item)] for key, item in value.items()]}
        case Tensor() if value.layout is torch.strided:
            flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            return {"tensor": [str(value.dtype), [*value.shape], flat.numpy().tobytes()]}
    return {"other": _plain(repr(value))}


def unpack(packed: bytes) -> Any:
    """Unpack a value.

    Raises:
        one of :data:`DECODE_ERRORS`: the bytes are invalid.
    """
    return _value(msgspec.msgpack.decode(packed))


def _value(packed: Any) -> Any:
    if isinstance(packed, list):
        return [*map(_value, packed)]
    if not isinstance(packed, dict):
        return packed
    ((kind, content),) = packed.items()
    match kind, content:
        case "dict", _:
            return {_value(key): _value(item) for key, item in content}
        case "tensor", (dtype, shape, data):
            kind = _DTYPES[dtype]
            flat = torch.frombuffer(bytearray(data), dtype=kind) if data else torch.empty(0)
            return flat.to(kind).reshape(shape)
        case "other", str():
            return OpaqueValue(content)
    return _CONTAINERS[kind](map(_value, content))
