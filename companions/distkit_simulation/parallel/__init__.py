"""Layouts, memory, parameter shards and idle time of a model on many ranks.

:class:`Layout` checks whether dp · pp · tp ranks can share a model; :class:`Transformer` computes
memory; :func:`shards` lists the shards on each rank; :func:`idle` measures waits.
"""

from distkit_simulation.parallel.layout import Layout
from distkit_simulation.parallel.memory import LLAMA_3_8B, States, Transformer, tensor_bytes
from distkit_simulation.parallel.sharding import idle, shards

__all__ = ["LLAMA_3_8B", "Layout", "States", "Transformer", "idle", "shards", "tensor_bytes"]
