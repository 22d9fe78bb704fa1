"""A model on many ranks: which layouts are possible, what they hold, and how long ranks wait.

:class:`Layout` says whether dp · tp · pp ranks can share a model; :class:`Transformer` how much
memory that takes; :func:`shards` which rank holds which piece; :func:`idle` how long ranks waited.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from distkit.lazy import attributes

if TYPE_CHECKING:
    from distkit.parallel.bubble import idle
    from distkit.parallel.layout import Layout
    from distkit.parallel.live import tensor_bytes
    from distkit.parallel.memory import LLAMA_3_8B, States, Transformer
    from distkit.parallel.pieces import shards

_HOMES = {
    "LLAMA_3_8B": "memory",
    "Layout": "layout",
    "States": "memory",
    "Transformer": "memory",
    "idle": "bubble",
    "shards": "pieces",
    "tensor_bytes": "live",
}
__all__ = ["LLAMA_3_8B", "Layout", "States", "Transformer", "idle", "shards", "tensor_bytes"]


__getattr__ = attributes(__name__, {n: f"{__name__}.{home}" for n, home in _HOMES.items()})
