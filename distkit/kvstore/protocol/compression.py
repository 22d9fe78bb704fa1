"""Gradients in fewer bits: what is lost in one push is added to the next (error feedback).

==========  ====================================================  ===================
type        an element becomes                                    bits per element
==========  ====================================================  ===================
2bit        −threshold, 0 or +threshold (MXNet's)                 2
1bit        +1 above the threshold, else −1 (MXNet's)             1
1bit_means  the mean of the positive, or of the other ones        1
topk        itself if it is one of the largest, else 0            64 × ratio
==========  ====================================================  ===================

Sources: MXNet's gradient compression, after Strom, Scalable distributed DNN training using
commodity GPU cloud computing, 2015; Seide et al., 1-bit stochastic gradient descent, 2014;
Aji & Heafield, Sparse communication for distributed gradient descent, 2017.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from distkit.errors import KVStoreError
from distkit.kvstore.protocol.messages import Key

#: Each type, its one number, and that number when none is given.
_NUMBERS: dict[str, tuple[str, float]] = {
    "2bit": ("threshold", 0.5),
    "1bit": ("threshold", 0.5),
    "1bit_means": ("", 0.0),
    "topk": ("ratio", 0.01),
}


class Codec(NamedTuple):
    """The codec of gradients.

    >>> Codec.of({"type": "2bit", "threshold": 0.5})
    Codec(kind='2bit', number=0.5)
    >>> packed, said = Codec("2bit", 0.5).pack(torch.tensor([0.7, -0.2, -3.0]))
    >>> packed.nbytes, said
    (1, tensor([ 0.5000,  0.0000, -0.5000]))
    """

    kind: str
    number: float

    @classmethod
    def of(cls, params: Mapping[str, Any]) -> Codec:
        """The codec of MXNet's ``compression_params``.

        Raises:
            KVStoreError: unknown type or parameter.
        """
        if not isinstance(params, Mapping):
            raise KVStoreError(
                f"set_gradient_compression got {params!r}. "
                'Give {"type": "2bit", "threshold": 0.5}.'
            )
        kind = params.get("type")
        if not isinstance(kind, str) or kind not in _NUMBERS:
            raise KVStoreError(
                f"set_gradient_compression with type={kind!r}. There are: {', '.join(_NUMBERS)}."
            )
        name, default = _NUMBERS[kind]
        if odd := set(params) - {"type", name}:
            takes = f"It takes {name!r}." if name else "It takes no other."
            raise KVStoreError(
                f"set_gradient_compression of {kind} with {sorted(odd, key=str)}. {takes}"
            )
        try:
            number = float(params.get(name, default))
        except (TypeError, ValueError):
            raise KVStoreError(
                f"set_gradient_compression with {name}={params[name]!r}: "
                f"give a number such as {default}."
            ) from None
        least = -math.inf if kind == "1bit" else 0
        if name and not least < number < (1 if kind == "topk" else math.inf):
            raise KVStoreError(
                f"set_gradient_compression with {name}={number}: must be above 0"
                f"{' and below 1' if kind == 'topk' else ''}."
            )
        return cls(kind, number)

    def pack(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The flat float32 tensor in few bytes, and what the server will read in them."""
        packed = _PACK[self.kind](x, self.number)
        return packed, unpack(str(self), packed, len(x), torch.float32)

    def __str__(self) -> str:
        return f"{self.kind}:{self.number}"


class Compression:
    """A worker's compression: a codec, and what it still owes of each key."""

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self._owed: dict[tuple[Key, int], Tensor] = {}

    @staticmethod
    def check(key: Key, gradient: Tensor) -> None:
        """Refuse what cannot be packed.

        Raises:
            KVStoreError: it has no fractions to lose.
        """
        if not gradient.is_floating_point():
            raise KVStoreError(
                f"push of {key!r}: {gradient.dtype} cannot be compressed. "
                "Compress floating-point gradients only."
            )

    def pack(self, key: Key, server: int, gradient: Tensor) -> Tensor:
        """Pack a server's or device's part of a gradient with what was lost of it before.

        Raises:
            KVStoreError: it cannot be packed.
        """
        self.check(key, gradient)
        owed = self._owed.get((key, server))
        x = gradient.float() if owed is None else gradient.float() + owed
        packed, said = self.codec.pack(x)
        self._owed[key, server] = x - said
        return packed


def unpack(codec: str, packed: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """The gradient of ``size`` elements in these bytes.

    Raises:
        KVStoreError: they are not what the codec makes of so many elements.
    """
    kind, _, number = codec.partition(":")
    try:
        return _UNPACK[kind](packed, size, float(number)).to(dtype)
    except (KeyError, ValueError, RuntimeError, IndexError):
        raise KVStoreError(
            f"a gradient of {size} elements in {packed.numel()} bytes of {codec!r}. "
            "Install the same version of distkit on all nodes."
        ) from None


def _pack_bits(codes: Tensor, bits: int) -> Tensor:
    """Codes of so many bits, as many in a byte as fit."""
    each = 8 // bits
    padded: Tensor = torch.nn.functional.pad(codes, (0, -len(codes) % each)).view(-1, each)
    shifts = torch.arange(each, dtype=torch.uint8) * bits
    return (padded << shifts).sum(1, dtype=torch.uint8)


def _unpack_bits(packed: Tensor, bits: int, size: int) -> Tensor:
    each = 8 // bits
    if len(packed) != -(-size // each):
        raise ValueError("length")
    shifts = torch.arange(each, dtype=torch.uint8) * bits
    codes: Tensor = (packed[:, None] >> shifts) & (2**bits - 1)
    return codes.view(-1)[:size]


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def _pack_2bit(x: Tensor, threshold: float) -> Tensor:
    return _pack_bits((x >= threshold).byte() + 2 * (x <= -threshold).byte(), 2)


def _unpack_2bit(packed: Tensor, size: int, threshold: float) -> Tensor:
    return torch.tensor([0, threshold, -threshold, 0])[_unpack_bits(packed, 2, size).long()]


def _pack_1bit(x: Tensor, threshold: float) -> Tensor:
    return _pack_bits((x > threshold).byte(), 1)


def _unpack_1bit(packed: Tensor, size: int, threshold: float) -> Tensor:
    return torch.tensor([-1.0, 1.0])[_unpack_bits(packed, 1, size).long()]


def _pack_means(x: Tensor, number: float) -> Tensor:
    positive = x > 0
    means = [
        part.mean() if part.numel() else x.new_zeros(()) for part in (x[~positive], x[positive])
    ]
    return torch.cat([_bytes(torch.stack(means)), _pack_bits(positive.byte(), 1)])


def _unpack_means(packed: Tensor, size: int, number: float) -> Tensor:
    means = packed[:8].clone().view(torch.float32)
    return means[_unpack_bits(packed[8:], 1, size).long()]


def _pack_topk(x: Tensor, ratio: float) -> Tensor:
    kept = x.abs().topk(min(len(x), max(1, math.ceil(ratio * len(x))))).indices
    return torch.cat([_bytes(kept.int()), _bytes(x[kept])])


def _unpack_topk(packed: Tensor, size: int, ratio: float) -> Tensor:
    places, values = packed.clone().view(2, -1)
    found = torch.zeros(size)
    found[places.view(torch.int32).long()] = values.view(torch.float32)
    return found


_PACK: dict[str, Callable[[Tensor, float], Tensor]] = {
    "2bit": _pack_2bit,
    "1bit": _pack_1bit,
    "1bit_means": _pack_means,
    "topk": _pack_topk,
}
_UNPACK: dict[str, Callable[[Tensor, int, float], Tensor]] = {
    "2bit": _unpack_2bit,
    "1bit": _unpack_1bit,
    "1bit_means": _unpack_means,
    "topk": _unpack_topk,
}
