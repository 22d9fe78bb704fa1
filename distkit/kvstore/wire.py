"""Messages as bytes: a JSON header, then the tensors' buffers as they lie in memory.

Nothing is pickled and nothing that arrives is executed. Neither direction copies a tensor.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import fields
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch

from distkit.errors import KVStoreError
from distkit.kvstore import messages
from distkit.kvstore.memory import LARGE, over
from distkit.kvstore.messages import Message
from distkit.kvstore.placement import dtype_name

if TYPE_CHECKING:
    from torch import Tensor

Frame: TypeAlias = "bytes | memoryview"
#: Where another process finds a tensor (see :meth:`.memory.Exchange.lend`), and the way back.
Lend: TypeAlias = "Callable[[Tensor], list[int] | None]"
Borrow: TypeAlias = "Callable[[list[int]], memoryview]"

_JSON, _PARSER = json.JSONEncoder(separators=(",", ":")), json.JSONDecoder()

#: The dtypes that can be added up, by name.
DTYPES = {
    name: getattr(torch, name)
    for name in ("float16", "bfloat16", "float32", "float64", "complex64", "complex128",
                 "bool", "uint8", "int8", "int16", "int32", "int64")
}  # fmt: skip


class _Kind(NamedTuple):
    """How messages of a class are written and read."""

    make: Any
    values: Callable[[Message], tuple[Any, ...]]
    types: list[tuple[type, ...]]  # of each field, in JSON
    readers: list[tuple[int, Callable[[Any], Any]]]  # of those fields that JSON has no type for
    tensor: int  # which of the fields is one; -1: none


#: Small tensors begin at multiples of so many bytes, as all dtypes like it.
_ALIGN = 16

#: No header comes near this many bytes.
_HEADER_LIMIT = 1 << 20


class Batch(NamedTuple):
    """Messages that travel together; ``back`` numbers what was lent before (:mod:`.memory`)."""

    messages: list[Message]
    back: list[int]


def encode(
    *messages: Message, back: Sequence[int] = (), lend: Lend = lambda tensor: None
) -> list[Frame]:
    """Messages as frames: a header, then the tensors that are sent.

    Args:
        messages: to one node.
        back: numbers of what that node has lent, and gets back.
        lend: tells where the node finds a tensor; None if it must be sent.

    >>> encode(messages.Describe(0, 1, 2, "w"))
    [b'[[],["Describe",0,1,2,"w","pull of"]]']
    """
    payload = _Payload()
    header: list[Any] = [back]
    for message in messages:
        name = type(message).__name__
        kind = _KINDS[name]
        body = [name, *kind.values(message)]
        at = kind.tensor + 1
        if at and (tensor := body[at]) is not None:
            body[at] = [dtype_name(tensor), *(lend(tensor) or payload.add(tensor))]
        header.append(body)
    return [_JSON.encode(header).encode(), *payload.frames()]


def decode(frames: Sequence[Frame], borrow: Borrow | None = None) -> Batch:
    """The messages in these frames; their tensors lie in the frames' memory, or in borrowed.

    Args:
        frames: as :func:`encode` made them.
        borrow: opens what is lent; None where nothing is.

    Raises:
        KVStoreError: malformed in any way.
    """
    try:
        return _decode(frames, borrow)
    except (ValueError, TypeError, KeyError, IndexError, OverflowError, RecursionError) as e:
        raise KVStoreError(
            f"a message that is none of distkit's: {type(e).__name__}: {e}. "
            "Let only nodes of one cluster, with one version of distkit, use its folder."
        ) from None


def _decode(frames: Sequence[Frame], borrow: Borrow | None) -> Batch:
    header, *payload = frames
    if len(header) > _HEADER_LIMIT:
        raise ValueError(f"a header of {len(header)} bytes")
    text = str(header, "utf-8")
    (back, *bodies), end = _PARSER.raw_decode(text)
    if end != len(text):
        raise ValueError("more than a header")
    tensors = _Tensors(payload, borrow)
    found = []
    for name, *body in bodies:
        kind = _KINDS[name]
        if kind.tensor >= 0 and (said := body[kind.tensor]) is not None:
            body[kind.tensor] = tensors.read(said)
        for value, types in zip(body, kind.types, strict=True):
            if type(value) not in types:
                raise ValueError(f"{value!r:.40} where {types} was expected")
        for field, read in kind.readers:
            body[field] = read(body[field])
        found.append(kind.make(*body))
    if tensors.left:
        raise ValueError("more frames than the header tells of")
    return Batch(found, [_int(n) for n in back])


# -- one field, by its annotation -----------------------------------------------


def _int(value: Any) -> int:
    if type(value) is not int:
        raise ValueError(f"{value!r:.40} where a whole number was expected")
    return value


def _sizes(value: list[Any]) -> tuple[int, ...]:
    return tuple(map(_int, value))


def _endpoints(value: dict[str, Any]) -> dict[int, str]:
    if not all(type(v) is str for v in value.values()):
        raise ValueError("endpoints that are no words")
    return {int(k): v for k, v in value.items()}


def _numbers(value: dict[str, Any]) -> dict[str, float]:
    if not all(type(v) in (int, float) for v in value.values()):
        raise ValueError("options that are no numbers")
    return value


#: What a field is in JSON, and what makes of that what it is declared as.
_FIELDS: dict[str, tuple[tuple[type, ...], Callable[[Any], Any] | None]] = {
    "int": ((int,), None),
    "str": ((str,), None),
    "Key": ((int, str), None),
    "tuple[int, ...]": ((list,), _sizes),
    "dict[int, str]": ((dict,), _endpoints),
    "dict[str, float]": ((dict,), _numbers),
    "Tensor": ((torch.Tensor,), None),
    "Tensor | None": ((torch.Tensor, type(None)), None),
}


def _kind(cls: Any) -> _Kind:
    names = [f.name for f in fields(cls)]
    known = [_FIELDS[str(f.type)] for f in fields(cls)]
    readers = [(i, read) for i, (_, read) in enumerate(known) if read is not None]
    tensor = next((i for i, (types, _) in enumerate(known) if torch.Tensor in types), -1)
    return _Kind(cls, attrgetter(*names), [types for types, _ in known], readers, tensor)


#: Of each kind that travels.
_KINDS = {cls.__name__: _kind(cls) for cls in (
    messages.Register, messages.Barrier, messages.AddressBook, messages.RollCall, messages.Init,
    messages.Push, messages.Pull, messages.Describe, messages.SetOptimizer, messages.GetState,
    messages.SetState, messages.Copy, messages.Leave, messages.Departed, messages.Reply,
    messages.Error, messages.Present, messages.Missed, messages.Replaced,
)}  # fmt: skip


# -- tensors --------------------------------------------------------------------


class _Payload:
    """The tensors of a letter: small ones together in one frame, each large one in its own."""

    def __init__(self) -> None:
        self._small: list[Frame] = []
        self._large: list[Frame] = []
        self._size = 0

    def add(self, tensor: Tensor) -> list[int]:
        """Where it will lie: from where on in the first frame, and so many bytes; or nothing."""
        buffer, size = _buffer(tensor), tensor.nbytes
        if size >= LARGE:
            self._large.append(buffer)
            return []
        start = self._size
        self._small += buffer, bytes(-size % _ALIGN)
        self._size += size + -size % _ALIGN
        return [start, size]

    def frames(self) -> list[Frame]:
        """No frame without a tensor; else the small ones, even if there is none."""
        return [b"".join(self._small), *self._large] if self._small or self._large else []


def _buffer(tensor: Tensor) -> Frame:
    """The memory of a flat, contiguous CPU tensor."""
    if not tensor.numel():
        return b""
    array: Any = tensor.view(torch.uint8).numpy()
    return memoryview(array)


class _Tensors:
    """The tensors of a letter that came, in turn.

    Args:
        frames: as :class:`_Payload` made them.
        borrow: opens what is lent.
    """

    def __init__(self, frames: list[Frame], borrow: Borrow | None) -> None:
        self._small = bytearray(frames[0]) if frames else bytearray()  # ours, and aligned
        self._large = frames[:0:-1]
        self._borrow, self._end = borrow, 0

    @property
    def left(self) -> bool:
        """Whether there are bytes that no tensor had."""
        return bool(self._large) or self._end < len(self._small)

    def read(self, said: Any) -> Tensor:
        """A flat tensor where its header says: among the small ones, lent, or the next large."""
        name, *numbers = said
        dtype, where = DTYPES[name], [_int(n) for n in numbers]
        if len(where) == 2:
            return self._part(where[0], where[1], dtype)
        if where:
            if self._borrow is None:
                raise ValueError("a loan from nobody")
            tensor = over(self._borrow(where), dtype)
        else:
            tensor = over(self._large.pop(), dtype)  # IndexError if there is none
        aligned = tensor.data_ptr() % dtype.itemsize == 0  # frames lie anywhere
        return tensor if aligned else tensor.clone()

    def _part(self, start: int, size: int, dtype: torch.dtype) -> Tensor:
        end = start + size
        if not 0 <= start <= end <= len(self._small) or start % _ALIGN or size % dtype.itemsize:
            raise ValueError(f"{size} bytes from {start} on of {len(self._small)}")
        self._end = max(self._end, end + -end % _ALIGN)
        if not size:
            return torch.empty(0, dtype=dtype)
        count = size // dtype.itemsize
        return torch.frombuffer(self._small, dtype=dtype, count=count, offset=start)
