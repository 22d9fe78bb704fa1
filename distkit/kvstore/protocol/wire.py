"""Messages as bytes: a JSON header, then the tensors' buffers as they lie in memory.

A letter's first frame is the header's length (4 bytes, little-endian), the header, and the small
tensors one after the other; each large tensor has a frame of its own, which nobody copies. Nothing
is pickled and nothing that arrives is executed.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import fields
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch

from distkit.errors import KVStoreError
from distkit.kvstore.protocol import messages
from distkit.kvstore.protocol.messages import Message
from distkit.kvstore.protocol.placement import dtype_name
from distkit.kvstore.transport.memory import LARGE, over

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
    for name in (
        "float16",
        "bfloat16",
        "float32",
        "float64",
        "complex64",
        "complex128",
        "bool",
        "uint8",
        "int8",
        "int16",
        "int32",
        "int64",
    )
}


class _Kind(NamedTuple):
    """The encoding of the messages of a class."""

    make: Any
    values: Callable[[Message], tuple[Any, ...]]
    types: set[tuple[type, ...]]  # that its fields may have in JSON
    readers: list[tuple[int, Callable[[Any], Any]]]  # of those fields that JSON has no type for
    tensor: int  # which of the fields is one; -1: none


#: Small tensors begin at multiples of so many bytes, as all dtypes like it.
_ALIGN = 16

#: No header comes near this many bytes.
_HEADER_LIMIT = 1 << 20


class Batch(NamedTuple):
    """Messages that travel together.

    ``back`` numbers what was lent before (:mod:`.memory`); ``line`` is the number of the sender's
    connection to this receiver.
    """

    messages: list[Message]
    back: list[int]
    line: int


def encode(
    *messages: Message, back: Sequence[int] = (), lend: Lend = lambda tensor: None, line: int = 0
) -> list[Frame]:
    r"""Messages as frames, at least one.

    Args:
        messages: to one node.
        back: numbers of what that node has lent, and gets back.
        lend: tells where the node finds a tensor; None if it must be sent.
        line: number of the sender's connection to that node; a later one has a higher number.

    >>> encode(messages.Describe(0, 1, 2, "w"))
    [b'\'\x00\x00\x00[0,[],["Describe",0,1,2,"w","pull of"]]']
    """
    payload = _Payload()

    def enclose(tensor: Tensor) -> list[Any]:
        return [dtype_name(tensor), *(lend(tensor) or payload.add(tensor))]

    bodies = [_body(message, enclose) for message in messages]
    return payload.frames(_JSON.encode([line, back, *bodies]).encode())


def outline(message: Message) -> str:
    """A message without its tensor.

    >>> outline(messages.SetState(0, 1, 2, "w", "momentum", torch.ones(3)))
    '["SetState",0,1,2,"w","momentum",true]'
    """
    return _JSON.encode(_body(message, lambda tensor: True))


def filled(text: str, tensor: Tensor | None) -> Message:
    """The message of this outline, with its tensor.

    Raises:
        KVStoreError: malformed in any way.
    """
    try:
        return _message(_parsed(text), lambda said: tensor)
    except _MALFORMED as e:
        raise _foreign(e) from None


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
    except _MALFORMED as e:
        raise _foreign(e) from None


def _decode(frames: Sequence[Frame], borrow: Borrow | None) -> Batch:
    first, *large = frames
    view = memoryview(first)
    start = 4 + int.from_bytes(view[:4], "little")
    if start > min(len(view), _HEADER_LIMIT):
        raise ValueError(f"a header of {start} bytes")
    line, back, *bodies = _parsed(str(view[4:start], "utf-8"))
    tensors = _Tensors(view[start:], large, borrow)
    batch = Batch([_message(body, tensors.read) for body in bodies], _whole(back), *_whole([line]))
    if tensors.left:
        raise ValueError("more bytes than the header tells of")
    return batch


#: What malformed bytes lead to.
_MALFORMED = ValueError, TypeError, KeyError, IndexError, OverflowError, RecursionError


def _foreign(e: Exception) -> KVStoreError:
    return KVStoreError(
        f"a message that is none of distkit's: {type(e).__name__}: {e}. "
        "Let only nodes of one cluster, with one version of distkit, use its folder."
    )


def _parsed(text: str) -> list[Any]:
    found, end = _PARSER.raw_decode(text)
    if end != len(text) or type(found) is not list:
        raise ValueError("other than one list")
    return found


def _body(message: Message, enclose: Callable[[Tensor], Any]) -> list[Any]:
    """A message as JSON has it; of its tensor what ``enclose`` says."""
    name = type(message).__name__
    kind = _KINDS[name]
    body = [name, *kind.values(message)]
    at = kind.tensor + 1
    if at and body[at] is not None:
        body[at] = enclose(body[at])
    return body


def _message(body: list[Any], read: Callable[[Any], Tensor | None]) -> Message:
    """Undo :func:`_body`; ``read`` finds its tensor."""
    name, *values = body
    kind = _KINDS[name]
    if kind.tensor >= 0 and (said := values[kind.tensor]) is not None:
        values[kind.tensor] = read(said)
    if tuple(map(type, values)) not in kind.types:
        raise ValueError(f"a {name} with other fields")
    for field, reader in kind.readers:
        values[field] = reader(values[field])
    made: Message = kind.make(*values)
    return made


# -- one field, by its annotation -----------------------------------------------


def _whole(numbers: list[Any]) -> list[int]:
    if not set(map(type, numbers)) <= {int}:
        raise ValueError(f"{numbers!r:.40} where whole numbers were expected")
    return numbers


def _sizes(value: list[Any]) -> tuple[int, ...]:
    return tuple(_whole(value))


def _endpoints(value: dict[str, Any]) -> dict[int, str]:
    if not all(type(v) is str for v in value.values()):
        raise ValueError("endpoints that are no words")
    return {int(k): v for k, v in value.items()}


def _plain(value: Any, depth: int = 4) -> Any:
    """A plain JSON value, not nested deeply: an optimizer's options."""
    inner = list(value.values()) if type(value) is dict else value if type(value) is list else []
    if inner and not depth:
        raise ValueError("options within options")
    for one in inner:
        _plain(one, depth - 1)
    return value


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
    "dict[str, Any]": ((dict,), _plain),
    "Tensor": ((torch.Tensor,), None),
    "Tensor | None": ((torch.Tensor, type(None)), None),
}


def _kind(cls: Any) -> _Kind:
    names = [f.name for f in fields(cls)]
    known = [_FIELDS[str(f.type)] for f in fields(cls)]
    readers = [(i, read) for i, (_, read) in enumerate(known) if read is not None]
    types = set(itertools.product(*(types for types, _ in known)))
    tensor = next((i for i, (types, _) in enumerate(known) if torch.Tensor in types), -1)
    return _Kind(cls, attrgetter(*names), types, readers, tensor)


#: Of each kind that travels.
_KINDS = {
    cls.__name__: _kind(cls)
    for cls in (
        messages.Register,
        messages.Barrier,
        messages.AddressBook,
        messages.RollCall,
        messages.Init,
        messages.Push,
        messages.Pull,
        messages.Rest,
        messages.Describe,
        messages.SetOptimizer,
        messages.GetState,
        messages.SetState,
        messages.Copy,
        messages.Leave,
        messages.Departed,
        messages.Reply,
        messages.Error,
        messages.Present,
        messages.Missed,
        messages.Replaced,
        messages.Copied,
        messages.Joined,
        messages.Appointed,
        messages.Portion,
    )
}


# -- tensors --------------------------------------------------------------------


class _Payload:
    """The tensors of a letter: small ones with the header, each large one in its own frame."""

    def __init__(self) -> None:
        self._small: list[Frame] = []
        self._large: list[Frame] = []
        self._size = 0

    def add(self, tensor: Tensor) -> list[int]:
        """The place of a tensor: its offset after the header and its bytes; or nothing."""
        buffer, size = _buffer(tensor), tensor.nbytes
        if size >= LARGE:
            self._large.append(buffer)
            return []
        start = self._size
        self._small += buffer, bytes(-size % _ALIGN)
        self._size += size + -size % _ALIGN
        return [start, size]

    def frames(self, header: bytes) -> list[Frame]:
        """The letter."""
        length = len(header).to_bytes(4, "little")
        return [b"".join((length, header, *self._small)), *self._large]


def _buffer(tensor: Tensor) -> Frame:
    """The memory of a flat, contiguous CPU tensor."""
    if not tensor.numel():
        return b""
    array: Any = tensor.view(torch.uint8).numpy()  # there is no bfloat16 in NumPy
    return memoryview(array)


class _Tensors:
    """The tensors of a letter that came, in turn.

    Args:
        small: what came after the header.
        large: the other frames.
        borrow: opens what is lent.
    """

    def __init__(self, small: Frame, large: list[Frame], borrow: Borrow | None) -> None:
        self._small, self._large = bytearray(small), large[::-1]  # ours, and aligned
        self._borrow, self._end = borrow, 0

    @property
    def left(self) -> bool:
        """True if there are bytes that no tensor had."""
        return bool(self._large) or self._end < len(self._small)

    def read(self, said: Any) -> Tensor:
        """A flat tensor where its header says: among the small ones, lent, or the next large."""
        name, *numbers = said
        dtype, where = DTYPES[name], _whole(numbers)
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
