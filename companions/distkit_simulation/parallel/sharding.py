"""Shards of a model on each rank, and idle time of ranks in a run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from distkit.events import Op, Span
from distkit.trace.log import EventLog
from distkit.views.timeline.columns import length

if TYPE_CHECKING:
    from torch import Tensor, nn


def shards(
    model: nn.Module | Tensor | Mapping[str, Tensor], name: str = "tensor"
) -> list[dict[str, Any]]:
    """List the shards of each parameter on each rank. All ranks must call it.

    Plain tensors, DTensors of any mesh, models under ``fully_shard``, ranks with different layers,
    and the layers of :mod:`distkit.algorithms.tensor_parallel` are supported. Only sizes are sent.

    Args:
        model: a model, a tensor, or tensors by name.
        name: the name of a single tensor.

    Returns:
        The ``name``, global ``shape`` and ``shards`` of each tensor. There is one shard per rank
        that stores a part of the tensor: its ``rank``, its ``offset`` and ``shape`` in each
        dimension, and its ``placement`` in torch's notation, such as "Shard(0)".

    Raises:
        ValueError: a tensor's shape differs between ranks, or the tensor is in a flat vector of
            stage-3 :class:`.zero.Zero`, whose shards are not shards of single tensors.

    Example:
        >>> import torch
        >>> shards(torch.zeros(4, 2))[0]["shards"]
        [{'rank': 0, 'offset': [0, 0], 'shape': [4, 2], 'placement': 'Replicate()'}]
    """
    import torch.distributed as dist

    declared = _declared_shards(model)
    local = [declared.get(key) or _shard(key, tensor) for key, tensor in _named(model, name)]
    gathered: list[Any] = [local]
    if dist.is_initialized():
        gathered = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, local)
    entries: dict[str, dict[str, Any]] = {}
    for rank, rank_shards in enumerate(gathered):
        for key, shape, shard in rank_shards:
            if shape is None:
                raise ValueError(
                    f"{key!r} is in a flat vector of Zero, whose shards are not shards of single "
                    "tensors. Use torch's fully_shard, which shards each tensor"
                )
            entry = entries.setdefault(key, {"name": key, "shape": shape, "shards": []})
            if entry["shape"] != shape:
                raise ValueError(
                    f"{key!r} has shape {entry['shape']} on rank {entry['shards'][0]['rank']} and "
                    f"{shape} on rank {rank}: use different names for different tensors"
                )
            if shard is not None:
                entry["shards"].append({"rank": rank, **shard})
    return list(entries.values())


def _named(model: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    if hasattr(model, "named_parameters"):
        yield from model.named_parameters()
    elif isinstance(model, Mapping):
        yield from model.items()
    else:
        yield name, model


_Shard = tuple[str, list[int] | None, dict[str, Any] | None]


def _declared_shards(model: Any) -> dict[str, _Shard]:
    """Return the parameters that layers declare as equally sharded over a group."""
    import torch.distributed as dist

    declared: dict[str, _Shard] = {}
    for path, module in model.named_modules() if hasattr(model, "named_modules") else ():
        for name, dim in getattr(module, "sharded", {}).items():
            if (part := getattr(module, name)) is not None:
                key, local = f"{path}.{name}".lstrip("."), list(part.shape)
                shape, offset = local.copy(), [0] * len(local)
                shape[dim] *= dist.get_world_size(module.group)
                offset[dim] = local[dim] * dist.get_rank(module.group)
                placement = f"Shard({dim})"
                declared[key] = (
                    key,
                    shape,
                    {"offset": offset, "shape": local, "placement": placement},
                )
    return declared


def _shard(key: str, tensor: Tensor) -> _Shard:
    """Return a tensor's name, its global shape, and this rank's shard."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if hasattr(tensor, "in_vector"):
        return key, None, None
    shape, placement = list(tensor.shape), "Replicate()"
    local, offset = shape, [0] * len(shape)
    if isinstance(tensor, DTensor):
        if tensor.device_mesh.get_coordinate() is None:
            return key, shape, None
        local, offset = map(
            list,
            compute_local_shape_and_global_offset(
                tensor.shape, tensor.device_mesh, tensor.placements
            ),
        )
        placement = ", ".join(map(_placement, tensor.placements))
    return key, shape, {"offset": offset, "shape": local, "placement": placement}


def _placement(placement: Any) -> str:
    """Format a placement as code."""
    if placement.is_partial():
        return f"Partial({placement.reduce_op})"
    return "Replicate()" if placement.is_replicate() else f"Shard({placement.dim})"


#: Operations that do not block computation: marks and sends.
_NON_BLOCKING = {Op.MARK, Op.SEND}


def idle(trace: EventLog, label: str = "") -> dict[int, float]:
    """Return the fraction of time that each rank spends in receives and collectives, or idle.

    The time extends from the first start to the last end of any rank; a rank is also idle before
    its own start and after its own end. For a pipeline with one stage per rank and free messages,
    the result is (p-1)/(m+p-1).

    Args:
        trace: the trace of a run or of the simulator.
        label: the label of a ``dk.mark`` on every rank; its last span is measured. "" measures
            the whole trace.

    Returns:
        The fraction, from 0 to 1, of each rank.

    Raises:
        ValueError: a rank has no such mark.

    Example:
        >>> from distkit_simulation import Link, Network, pipeline
        >>> trace = pipeline(4, 9, 1.0, 2.0, 0, Network(Link(0, 0)))
        >>> idle(trace)
        {0: 0.25, 1: 0.25, 2: 0.25, 3: 0.25}
    """
    spans = [span for span in trace.spans if span.end is not None]
    windows = {rank: _window(spans, rank, label) for rank in trace.ranks}
    begin, end = min(a for a, _ in windows.values()), max(b for _, b in windows.values())
    shares = {}
    for rank, (first, last) in windows.items():
        waits = [(begin, first), (last, end)]
        blocking = (s for s in spans if s.rank == rank and s.op not in _NON_BLOCKING)
        waits += [(s.start, s.end) for s in blocking if s.end is not None]
        shares[rank] = length(*np.clip(waits, begin, end).T) / (end - begin)
    return shares


def _window(spans: Iterable[Span], rank: int, label: str) -> tuple[float, float]:
    """Return the start and end of the measured part on a rank."""
    candidates = [s for s in spans if s.rank == rank and label in ("", s.label)]
    if not candidates:
        missing = f"no finished span {label!r}: put `with dk.mark({label!r}):` around the code"
        raise ValueError(f"rank {rank} has {missing if label else 'recorded nothing'}")
    measured = candidates[-1:] if label else candidates
    return min(s.start for s in measured), max(s.end for s in measured if s.end is not None)
