"""Placement of keys, and of parts of large arrays, on servers.

A key is stored on one server, chosen by a hash that is the same in every process. An array of at
least ``bound`` elements is split into nearly equal parts, one per server. MXNet calls the bound
``MXNET_KVSTORE_BIGARRAY_BOUND``. Source: Li et al., 2014.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from distkit.errors import KVStoreError
from distkit.kvstore.protocol.messages import Key
from distkit.kvstore.protocol.options import BIGARRAY_BOUND

#: The dtypes that can be summed, by name.
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


class Part(NamedTuple):
    """Elements ``start`` to ``stop`` of the flattened array, on server number ``server``."""

    server: int
    start: int
    stop: int


def server_of(key: Key, servers: int) -> int:
    """Return the server of a key whose array is not split; integers are spread evenly, as in MXNet.

    >>> [server_of(key, 2) for key in ("weight", "bias", 3)]
    [1, 0, 1]
    """
    if isinstance(key, int):
        return key * 9973 % servers
    return zlib.crc32(repr(key).encode("ascii", "backslashreplace")) % servers


def parts_of(key: Key, size: int, servers: int, bound: int = BIGARRAY_BOUND) -> list[Part]:
    """Return the parts of an array.

    Args:
        key: the array's key.
        size: the number of elements.
        servers: number of servers.
        bound: minimum size of an array that is split [elements].

    >>> parts_of("w", 10, servers=2, bound=8)
    [Part(server=0, start=0, stop=5), Part(server=1, start=5, stop=10)]
    """
    if servers == 1 or size < bound:
        return [Part(server_of(key, servers), 0, size)]
    cuts = [size * i // servers for i in range(servers + 1)]
    return [Part(i, cuts[i], cuts[i + 1]) for i in range(servers)]


@dataclass(frozen=True)
class Layout:
    """The shape and dtype of a key, which are fixed when the key is initialized."""

    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"

    @cached_property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size of a tensor with this layout [bytes]."""
        return self.size * int(DTYPES[self.dtype].itemsize)

    def check(self, action: str, key: Key, shape: Sequence[int], dtype: str) -> None:
        """Check that a tensor fits the key.

        Raises:
            KVStoreError: Its shape or dtype differs.
        """
        if shape != self.shape or dtype != self.dtype:
            other = Layout(tuple(shape), dtype)
            raise KVStoreError(
                f"{action} {key!r} got {other}, but the key was initialized as {self}. "
                "The shape and dtype of a key are fixed: use a tensor like the first one, or "
                "another key."
            )


def dtype_name(tensor: Tensor) -> str:
    """Return the name of a tensor's dtype, such as ``"float32"``."""
    return str(tensor.dtype).removeprefix("torch.")
