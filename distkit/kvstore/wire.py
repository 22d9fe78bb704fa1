"""Messages as bytes: a JSON header, then the tensor's buffer as it lies in memory.

Nothing is pickled and nothing that arrives is executed. Neither direction copies a tensor.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from distkit.errors import KVStoreError
from distkit.kvstore import messages
from distkit.kvstore.messages import Message
from distkit.kvstore.placement import dtype_name

if TYPE_CHECKING:
    from torch import Tensor

Frame: TypeAlias = "bytes | memoryview"

#: The dtypes that can be added up, by name.
DTYPES = {
    name: getattr(torch, name)
    for name in ("float16", "bfloat16", "float32", "float64", "complex64", "complex128",
                 "bool", "uint8", "int8", "int16", "int32", "int64")
}  # fmt: skip

_KINDS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (messages.Register, messages.Barrier, messages.AddressBook, messages.RollCall,
                 messages.Init, messages.Push, messages.Pull, messages.Describe,
                 messages.SetOptimizer, messages.Reply, messages.Error)
}  # fmt: skip

#: No header comes near this many bytes.
_HEADER_LIMIT = 1 << 20


def encode(message: Message) -> list[Frame]:
    """A message as one or two frames: the header, and the tensor if it has one.

    >>> encode(messages.Pull(0, 1, 2, "w"))
    [b'["Pull",[0,1,2,"w"]]']
    """
    body = [getattr(message, f.name) for f in fields(message)]
    frames: list[Frame] = []
    for i, value in enumerate(body):
        if isinstance(value, torch.Tensor):
            body[i] = dtype_name(value)
            frames.append(_buffer(value))
    header = json.dumps([type(message).__name__, body], separators=(",", ":"))
    return [header.encode(), *frames]


def decode(frames: Sequence[Frame]) -> Message:
    """The message in these frames; its tensor lies in the second frame's memory.

    Raises:
        KVStoreError: malformed in any way.
    """
    try:
        return _decode(frames)
    except (ValueError, TypeError, KeyError, RecursionError) as e:
        raise KVStoreError(
            f"a message that is none of distkit's: {type(e).__name__}: {e}. "
            "Let only nodes of one cluster, with one version of distkit, use its folder."
        ) from None


def _decode(frames: Sequence[Frame]) -> Message:
    header, *payload = frames
    if len(header) > _HEADER_LIMIT:
        raise ValueError(f"a header of {len(header)} bytes")
    name, body = json.loads(bytes(header))
    kind = _KINDS[name]
    declared = fields(kind)
    values = [
        _tensor(value, payload) if f.type in ("Tensor", "Tensor | None") and value is not None
        else _READERS[str(f.type)](value)
        for f, value in zip(declared, body, strict=True)
    ]  # fmt: skip
    if payload:
        raise ValueError("more frames than the header tells of")
    message: Message = kind(*values)
    return message


# -- one field, by its annotation -----------------------------------------------


def _exactly(*types: type) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        if type(value) not in types:
            raise ValueError(f"{value!r:.40} where {types} was expected")
        return value

    return read


_int, _str = _exactly(int), _exactly(str)


def _sizes(value: Any) -> tuple[int, ...]:
    return tuple(map(_int, _exactly(list)(value)))


def _endpoints(value: Any) -> dict[int, str]:
    return {int(k): _str(v) for k, v in _exactly(dict)(value).items()}


def _numbers(value: Any) -> dict[str, float]:
    number = _exactly(int, float)
    return {k: number(v) for k, v in _exactly(dict)(value).items()}


_READERS: dict[str, Callable[[Any], Any]] = {
    "int": _int,
    "str": _str,
    "Key": _exactly(int, str),
    "tuple[int, ...]": _sizes,
    "dict[int, str]": _endpoints,
    "dict[str, float]": _numbers,
    "Tensor | None": _exactly(type(None)),
}


# -- tensors --------------------------------------------------------------------


def _buffer(tensor: Tensor) -> Frame:
    """The memory of a flat, contiguous CPU tensor."""
    if not tensor.numel():
        return b""
    array: Any = tensor.view(torch.uint8).numpy()
    return memoryview(array)


def _tensor(dtype: Any, payload: list[Frame]) -> Tensor:
    """A flat tensor over the memory of the next frame."""
    kind = DTYPES[_str(dtype)]
    if not payload:
        raise ValueError("a tensor without its frame")
    buffer = payload.pop(0)
    if not len(buffer):
        return torch.empty(0, dtype=kind)
    tensor = torch.frombuffer(buffer, dtype=kind)  # ValueError if the length does not fit
    aligned = tensor.data_ptr() % kind.itemsize == 0  # small frames lie anywhere
    return tensor if aligned else tensor.clone()
