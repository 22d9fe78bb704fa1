"""Gradient compression to 2 bits per element; the error is added to the next push (error feedback).

Each element becomes −threshold, 0 or +threshold. Sources: MXNet's gradient compression, after
Strom, Scalable distributed DNN training using commodity GPU cloud computing, 2015.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from distkit.errors import KVStoreError
from distkit.kvstore.protocol.messages import Key


class Compression:
    """Compresses a worker's gradients and keeps the current error of each part of each key.

    Args:
        params: MXNet's ``compression_params``.

    Raises:
        KVStoreError: The type is not 2bit, the threshold is not positive and finite, or there are
            other parameters.

    >>> two_bits = Compression({"type": "2bit", "threshold": 0.5})
    >>> packed = two_bits.pack("w", 0, torch.tensor([0.7, -0.2, -3.0]))
    >>> unpack(packed, two_bits.threshold, size=3)
    tensor([ 0.5000,  0.0000, -0.5000])
    """

    def __init__(self, params: Mapping[str, Any]) -> None:
        options = {"threshold": 0.5, **params} if isinstance(params, Mapping) else {}
        threshold = options.pop("threshold", None)
        is_valid = isinstance(threshold, (int, float)) and 0 < threshold < math.inf
        if options != {"type": "2bit"} or not is_valid:
            raise KVStoreError(
                f"set_gradient_compression got {params!r:.60}. "
                'Pass {"type": "2bit", "threshold": 0.5}, with a threshold above 0.'
            )
        self.threshold = float(threshold)
        self._errors: dict[tuple[Key, int], Tensor] = {}

    def pack(self, key: Key, server: int, gradient: Tensor) -> Tensor:
        """Compress the sum of a server's part of a gradient and the error of the previous push."""
        error = self._errors.get((key, server))
        x = gradient.float() if error is None else gradient.float() + error
        codes = (x >= self.threshold).byte() + 2 * (x <= -self.threshold).byte()
        groups: Tensor = torch.nn.functional.pad(codes, (0, -len(codes) % 4)).view(-1, 4)
        packed = (groups << _SHIFTS).sum(1, dtype=torch.uint8)
        self._errors[key, server] = x - unpack(packed, self.threshold, len(x))
        return packed


def unpack(packed: Tensor, threshold: float, size: int) -> Tensor:
    """Decompress a gradient of ``size`` elements."""
    codes = (packed[:, None] >> _SHIFTS) & 3
    return torch.tensor([0, threshold, -threshold, 0])[codes.view(-1)[:size].long()]


_SHIFTS = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)
