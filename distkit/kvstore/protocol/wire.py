"""Messages as bytes: a MessagePack header, then the memory of the large tensors.

The header contains the small tensors. Nothing is pickled, and no received data is executed.
"""

from __future__ import annotations

import threading
import warnings
from typing import Any, NamedTuple

import torch
from msgspec.msgpack import Decoder, Encoder
from torch import Tensor

from distkit.kvstore.protocol import messages
from distkit.kvstore.protocol.messages import Message
from distkit.kvstore.protocol.placement import DTYPES, dtype_name

#: Minimum size of a tensor that is sent without copying it into the header [bytes].
LARGE = 1 << 16

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

    ``server`` is the server that requests are addressed to, although its backup may handle them.
    """

    server: int
    messages: list[_AnyMessage]


def encode(*messages: Message, server: int = 0) -> tuple[bytes, list[memoryview]]:
    r"""Encode messages to one node as a header and the memory of the large tensors.

    Args:
        messages: the messages.
        server: the server that requests are addressed to.

    >>> encode(messages.Pull(1, 2, "w"))
    (b'\x92\x00\x91\x94\xa4Pull\x01\x02\xa1w', [])
    """
    large: list[memoryview] = []

    def enclose(tensor: Any) -> tuple[str, memoryview | int]:
        """Return a tensor's dtype and its memory, or its size if the memory follows the header."""
        array = memoryview(tensor.view(torch.uint8).numpy())  # NumPy has no bfloat16
        if array.nbytes < LARGE:
            return dtype_name(tensor), array
        large.append(array)
        return dtype_name(tensor), array.nbytes

    return Encoder(enc_hook=enclose).encode((server, messages)), large


def decode(header: Any, body: Any = b"") -> Batch:
    """Decode a header and the memory of the large tensors, without copying aligned tensors.

    Raises:
        msgspec.MsgspecError: the data is not a batch of messages.
    """
    _reader.body = memoryview(body)
    return _reader.decoder.decode(header)


class _Reader(threading.local):
    """The decoder of a thread, with the memory of the large tensors that are not decoded yet."""

    def __init__(self) -> None:
        self.body = memoryview(b"")
        self.decoder = Decoder(Batch, dec_hook=self._tensor)

    def _tensor(self, kind: type, encoded: tuple[str, Any]) -> Tensor:
        name, data = encoded
        dtype = DTYPES[name]
        if isinstance(data, int):
            size = data
            data, self.body = self.body[:size], self.body[size:]
        if not data:
            return torch.empty(0, dtype=dtype)
        tensor = torch.frombuffer(data, dtype=dtype)
        is_aligned = tensor.data_ptr() % dtype.itemsize == 0
        return tensor if is_aligned else tensor.clone()


_reader = _Reader()

with warnings.catch_warnings():  # torch warns once that memory may be read-only
    warnings.simplefilter("ignore", UserWarning)
    torch.frombuffer(b"0", dtype=torch.uint8)
