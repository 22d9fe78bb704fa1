"""Packs the values of an answer on its rank, and unpacks them where they are judged.

Unpacking executes nothing. Numbers, text, containers and tensors arrive as they were; any other
object is replaced by its text.
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

#: The errors of bytes that hold no value.
DAMAGED = (msgspec.MsgspecError, ValueError, TypeError, LookupError, RecursionError, RuntimeError)


@dataclass(frozen=True)
class Other:
    """Stands for an object that is no plain value: its text."""

    text: str

    def __repr__(self) -> str:
        return self.text


def pack(value: Any) -> bytes:
    """Pack a value on a rank."""
    return msgspec.msgpack.encode(_plain(value))


def _plain(value: Any) -> Any:
    """A value for msgpack; a dict with one key, its kind, stands for what msgpack does not know."""
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
            return value.encode(errors="backslashreplace").decode()  # half surrogates
        case int() if abs(value) < 1 << 63:
            return int(value)
        case list():
            return [*map(_plain, value)]
        case tuple() | set() | frozenset():
            kind = next(name for name, one in _CONTAINERS.items() if isinstance(value, one))
            return {kind: [*map(_plain, value)]}
        case dict():
            return {"dict": [[_plain(key), _plain(one)] for key, one in value.items()]}
        case Tensor() if value.layout is torch.strided:
            flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            return {"tensor": [str(value.dtype), [*value.shape], flat.numpy().tobytes()]}
    return {"other": _plain(repr(value))}


def unpack(packed: bytes) -> Any:
    """Read a value that a rank has packed.

    Raises:
        one of :data:`DAMAGED`: it has not.
    """
    return _value(msgspec.msgpack.decode(packed))


def _value(found: Any) -> Any:
    if isinstance(found, list):
        return [*map(_value, found)]
    if not isinstance(found, dict):
        return found
    ((kind, content),) = found.items()
    match kind, content:
        case "dict", _:
            return {_value(key): _value(one) for key, one in content}
        case "tensor", (dtype, shape, data):
            kind = _DTYPES[dtype]
            flat = torch.frombuffer(bytearray(data), dtype=kind) if data else torch.empty(0)
            return flat.to(kind).reshape(shape)
        case "other", str():
            return Other(content)
    return _CONTAINERS[kind](map(_value, content))
