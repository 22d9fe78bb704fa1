"""Model parallelism: pipelines, tensor parallelism, ZeRO, and layouts that combine them.

::

    from distkit_parallel import Layout, pipeline_step, split

    Layout(dp=2, pp=4, layers=32).coordinates(5)                  # {'dp': 1, 'pp': 1, 'tp': 0}
    stage = split(model, 4)[rank]                                 # this rank's layers
    loss = pipeline_step(stage, batch, loss_fn, microbatches=8)   # on every rank

:data:`PIPELINES` lists the pipeline schedules, and :func:`pipeline_step` runs a stage on a rank.
:class:`ColumnLinear` and :class:`RowLinear` split a layer, and :class:`Zero` shards the states of
data-parallel training. :class:`Layout` checks whether dp · pp · tp ranks can share a model,
:class:`Transformer` and :class:`States` compute memory, and :func:`tensor_bytes` measures it.
:func:`shards` lists the shards on each rank, and :func:`idle` measures the fraction of time that
ranks wait.
"""

from typing import TYPE_CHECKING

from distkit.imports import attributes

if TYPE_CHECKING:
    from distkit_parallel.idle_time import idle
    from distkit_parallel.layout import Layout
    from distkit_parallel.memory import LLAMA_3_8B, States, Transformer, tensor_bytes
    from distkit_parallel.pipeline import pipeline_step, split
    from distkit_parallel.schedules import PIPELINES
    from distkit_parallel.sharding import shards
    from distkit_parallel.tensor_parallel import ColumnLinear, RowLinear
    from distkit_parallel.zero import Zero

#: The names of each module, which is imported on first use: some modules need torch.
_NAMES = {
    "idle_time": ["idle"],
    "layout": ["Layout"],
    "memory": ["LLAMA_3_8B", "States", "Transformer", "tensor_bytes"],
    "pipeline": ["pipeline_step", "split"],
    "schedules": ["PIPELINES"],
    "sharding": ["shards"],
    "tensor_parallel": ["ColumnLinear", "RowLinear"],
    "zero": ["Zero"],
}

__all__ = [
    "LLAMA_3_8B",
    "PIPELINES",
    "ColumnLinear",
    "Layout",
    "RowLinear",
    "States",
    "Transformer",
    "Zero",
    "idle",
    "pipeline_step",
    "shards",
    "split",
    "tensor_bytes",
]

__getattr__ = attributes(
    __name__, {name: f"{__name__}.{module}" for module, names in _NAMES.items() for name in names}
)
