"""Messages as bytes: a MessagePack header, then the memory of the large tensors.

The first frame of a batch is the header, with the bytes of its small tensors. Each large tensor has
a separate frame, which is not copied. Nothing is pickled, and no received data is executed.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from msgspec.msgpack import Decoder, Encoder
from torch import Tensor

from distkit.kvstore.protocol import messages
from distkit.kvstore.protocol.messages import Message
from distkit.kvstore.protocol.placement import DTYPES, dtype_name
from distkit.kvstore.transport.memory import LARGE, Exchange, from_buffer

Frame: TypeAlias = "bytes | memoryview"

#: All types of messages that are sent.
_AnyMessage = (
    messages.Register
    | messages.Barrier
    | messages.AddressBook
    | messages.Init
    | messages.Push
    | messages.Pull
    | messages.AtBarrier
    | messages.Finished
    | messages.SetOptimizer
    | messages.Assign
    | messages.Note
    | messages.NoteStored
    | messages.Departed
    | messages.Reply
    | messages.Error
    | messages.Copy
)


class Batch(NamedTuple):
    """Messages that are sent together: the content of a header.

    ``server`` is the addressed server, although its backup may respond; ``returned_loans`` are the
    numbers of returned loans (:mod:`.memory`).
    """

    server: int
    returned_loans: list[int]
    messages: list[_AnyMessage]


_NO_EXCHANGE = Exchange(None)


def encode(*messages: Message, exchange: Exchange = _NO_EXCHANGE, server: int = 0) -> list[Frame]:
    r"""Encode messages as one or more frames.

    Args:
        messages: the messages to one node.
        exchange: lends tensors to that node; by default all of them are sent.
        server: the addressed server.

    >>> encode(messages.Pull(1, 2, "w"))
    [b'\x93\x00\x90\x91\x94\xa4Pull\x01\x02\xa1w']
    """
    large_frames: list[Frame] = []

    def enclose(tensor: Any) -> list[Any]:
        """Return a tensor's memory for the header, or put it into the next frame."""
        name = dtype_name(tensor)
        if (address := exchange.lend(tensor)) is not None:
            return [name, *address]
        array: Any = tensor.view(torch.uint8).numpy()  # NumPy has no bfloat16
        if tensor.nbytes < LARGE:
            return [name, memoryview(array)]
        large_frames.append(memoryview(array))
        return [name]

    content = server, exchange.returned_loans(), messages
    return [Encoder(enc_hook=enclose).encode(content), *large_frames]


def decode(frames: Sequence[Frame], exchange: Exchange = _NO_EXCHANGE) -> Batch:
    """Decode the messages in frames; large tensors use the frames' memory, or borrowed memory.

    Args:
        frames: the result of :func:`encode`.
        exchange: opens borrowed memory.

    Raises:
        PeerMemoryLost: A tensor is in the memory of a process that has exited.
    """
    header, *_reader.large_frames = frames
    _reader.exchange = exchange
    batch: Batch = _reader.decoder.decode(header)
    exchange.take_back(batch.returned_loans)
    return batch


class _Reader(threading.local):
    """The decoder of a thread, with the large tensors of the frames that it decodes."""

    def __init__(self) -> None:
        self.large_frames: list[Frame] = []
        self.exchange = _NO_EXCHANGE
        self.decoder = Decoder(Batch, dec_hook=self._tensor)

    def _tensor(self, kind: type, encoded: Any) -> Tensor:
        """Return a tensor from the header, the next large frame, or borrowed memory."""
        name, *address = encoded
        dtype = DTYPES[name]
        if not address:
            data: Any = self.large_frames.pop(0)
        elif isinstance(address[0], bytes):
            (data,) = address
        else:
            data = self.exchange.borrow(address)
        tensor = from_buffer(data, dtype)
        is_aligned = tensor.data_ptr() % dtype.itemsize == 0  # frames may be unaligned
        return tensor if is_aligned else tensor.clone()


_reader = _Reader()
