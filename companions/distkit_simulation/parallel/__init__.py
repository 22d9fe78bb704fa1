"""A model on many ranks: which layouts are possible, what they hold, and how long ranks wait.

:class:`Layout` says whether dp · tp · pp ranks can share a model; :class:`Transformer` how much
memory that takes; :func:`shards` which rank holds which piece; :func:`idle` how long ranks waited.
"""

from distkit_simulation.parallel.layout import Layout
from distkit_simulation.parallel.memory import LLAMA_3_8B, States, Transformer, tensor_bytes
from distkit_simulation.parallel.pieces import idle, shards

__all__ = ["LLAMA_3_8B", "Layout", "States", "Transformer", "idle", "shards", "tensor_bytes"]
