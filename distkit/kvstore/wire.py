"""Messages as bytes: a JSON header, then the tensors' buffers as they lie in memory.

Nothing is pickled and nothing that arrives is executed. Neither direction copies a tensor.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import fields
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

_JSON = json.JSONEncoder(separators=(",", ":"))

#: The dtypes that can be added up, by name.
DTYPES = {
    name: getattr(torch, name)
    for name in ("float16", "bfloat16", "float32", "float64", "complex64", "complex128",
                 "bool", "uint8", "int8", "int16", "int32", "int64")
}  # fmt: skip

_KINDS: tuple[Any, ...] = (
    messages.Register, messages.Barrier, messages.AddressBook, messages.RollCall, messages.Init,
    messages.Push, messages.Pull, messages.Describe, messages.SetOptimizer, messages.GetState,
    messages.SetState, messages.Copy, messages.Leave, messages.Departed, messages.Reply,
    messages.Error, messages.Present, messages.Missed,
    messages.Replaced,
)  # fmt: skip

#: Of each kind, its class and its fields: name, and how to read it; None if it is a tensor.
_FIELDS: dict[str, tuple[Any, list[tuple[str, Callable[[Any], Any] | None]]]] = {}

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
        kind = type(message).__name__
        body: list[Any] = [kind]
        for name, read in _FIELDS[kind][1]:
            value = getattr(message, name)
            if read is None and value is not None:
                value = [dtype_name(value), *(lend(value) or payload.add(value))]
            body.append(value)
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
    back, *bodies = json.loads(bytes(header))
    tensors = _Tensors(payload, borrow)
    found = []
    for name, *body in bodies:
        kind, declared = _FIELDS[name]
        found.append(kind(*[
            read(value) if read is not None
            else None if value is None else tensors.read(value)
            for (_, read), value in zip(declared, body, strict=True)
        ]))  # fmt: skip
    if tensors.left:
        raise ValueError("more frames than the header tells of")
    return Batch(found, [_int(n) for n in back])


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


#: None: a tensor.
_READERS: dict[str, Callable[[Any], Any] | None] = {
    "int": _int,
    "str": _str,
    "Key": _exactly(int, str),
    "tuple[int, ...]": _sizes,
    "dict[int, str]": _endpoints,
    "dict[str, float]": _numbers,
    "Tensor": None,
    "Tensor | None": None,
}

for _kind in _KINDS:
    _declared = [(f.name, _READERS[str(f.type)]) for f in fields(_kind)]
    _FIELDS[_kind.__name__] = _kind, _declared


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
        dtype, where = DTYPES[_str(name)], [_int(n) for n in numbers]
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
