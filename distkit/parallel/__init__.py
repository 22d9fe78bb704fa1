"""A model on many ranks: which layouts are possible, what they hold, and how long ranks wait.

:class:`Layout` says whether dp · tp · pp ranks can share a model; :class:`Transformer` how much
memory that takes; :func:`shards` which rank holds which piece; :func:`idle` how long ranks waited.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

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


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"distkit.parallel.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'distkit.parallel' has no attribute {name!r}")
