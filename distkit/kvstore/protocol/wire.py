"""Messages as bytes: a MessagePack header, then the tensors' buffers as they lie in memory.

A letter's first frame is the header's length (4 bytes, little-endian), the header, and the small
tensors one after the other; each large tensor has a frame of its own, which nobody copies. Nothing
is pickled and nothing that arrives is executed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from msgspec import MsgspecError, Struct
from msgspec.msgpack import Decoder, Encoder
from torch import Tensor

from distkit.errors import KVStoreError
from distkit.kvstore.protocol import messages, replication
from distkit.kvstore.protocol.messages import Message
from distkit.kvstore.protocol.placement import DTYPES, dtype_name
from distkit.kvstore.transport.memory import LARGE, over

Frame: TypeAlias = "bytes | memoryview"
#: Where another process finds a tensor (see :meth:`.memory.Exchange.lend`), and the way back.
Lend: TypeAlias = "Callable[[Tensor], list[int] | None]"
Borrow: TypeAlias = "Callable[[list[int]], memoryview]"

#: Every message that travels.
_AnyMessage = (
    messages.Register
    | messages.Barrier
    | messages.AddressBook
    | messages.RollCall
    | messages.Init
    | messages.Push
    | messages.Pull
    | messages.AtBarrier
    | messages.SetOptimizer
    | messages.Assign
    | messages.Note
    | messages.NoteStored
    | messages.Leave
    | messages.Departed
    | messages.Reply
    | messages.Error
    | replication.Copy
)

#: Small tensors begin at multiples of so many bytes, as all dtypes like it.
_ALIGN = 16

#: No header comes near this many bytes.
_HEADER_LIMIT = 1 << 20


class Batch(NamedTuple):
    """Messages that travel together.

    ``back`` numbers what was lent before (:mod:`.memory`); ``to`` is the server that is asked, in
    whose place another may answer.
    """

    messages: list[Message]
    back: list[int]
    to: int


def encode(
    *messages: Message, back: Sequence[int] = (), lend: Lend = lambda tensor: None, to: int = 0
) -> list[Frame]:
    r"""Messages as frames, at least one.

    Args:
        messages: to one node.
        back: numbers of what that node has lent, and gets back.
        lend: tells where the node finds a tensor; None if it must be sent.
        to: the server that is asked.

    >>> encode(messages.Pull(0, 1, 2, "w"))
    [b'\x1b\x00\x00\x00\x93\x00\x90\x91\x96\xa8Describe\x00\x01\x02\xa1w\xa7pull of']
    """
    payload = _Payload()

    def enclose(tensor: Any) -> list[Any]:
        return [dtype_name(tensor), *(lend(tensor) or payload.add(tensor))]

    return payload.frames(Encoder(enc_hook=enclose).encode((to, back, messages)))


def decode(frames: Sequence[Frame], borrow: Borrow | None = None) -> Batch:
    """The messages in these frames; their tensors lie in the frames' memory, or in borrowed.

    Args:
        frames: as :func:`encode` made them.
        borrow: opens what is lent; None where nothing is.

    Raises:
        KVStoreError: malformed in any way.
    """
    try:
        first, *large = frames
        view = memoryview(first)
        start = 4 + int.from_bytes(view[:4], "little")
        if start > min(len(view), _HEADER_LIMIT):
            raise ValueError(f"a header of {start} bytes")
        tensors = _Tensors(view[start:], large, borrow)
        _reader.find = tensors.read
        letter = _reader.decoder.decode(view[4:start])
        if tensors.left:
            raise ValueError("more bytes than the header tells of")
    except _MALFORMED as e:
        raise KVStoreError(
            f"a message that is none of distkit's: {type(e).__name__}: {e}. "
            "Let only nodes of one cluster, with one version of distkit, use its folder."
        ) from None
    return Batch([*letter.messages], letter.back, letter.to)


class _Letter(Struct, array_like=True, forbid_unknown_fields=True):
    """A header; its fields are those of :class:`Batch`."""

    to: int
    back: list[int]
    messages: list[_AnyMessage]


class _Reader(threading.local):
    """The decoder of a thread, and where it finds tensors."""

    def __init__(self) -> None:
        self.find: Callable[[Any], Tensor] = lambda said: torch.empty(0)
        self.decoder = Decoder(_Letter, dec_hook=lambda kind, said: self.find(said))


#: What malformed bytes lead to.
_MALFORMED = (
    MsgspecError,
    ValueError,
    TypeError,
    KeyError,
    IndexError,
    OverflowError,
    RecursionError,
    RuntimeError,
)


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
        """A tensor where its header says: among the small ones, lent, or the next large."""
        name, *numbers = said
        if not set(map(type, numbers)) <= {int}:
            raise ValueError(f"{numbers!r:.40} where whole numbers were expected")
        dtype, where = DTYPES[name], numbers
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


_reader = _Reader()
