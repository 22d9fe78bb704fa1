"""Lists the shards of a model on each rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn


def shards(
    model: nn.Module | Tensor | Mapping[str, Tensor], name: str = "tensor"
) -> list[dict[str, Any]]:
    """List the shards of each parameter on each rank. All ranks must call this function.

    Plain tensors, DTensors on any mesh, models under ``fully_shard``, ranks with different layers,
    and the layers of :mod:`distkit_parallel.tensor_parallel` are supported. No values are sent.

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
    """Return this rank's shards of parameters that layers declare as evenly sharded, by name."""
    import torch.distributed as dist

    declared: dict[str, _Shard] = {}
    for path, module in model.named_modules() if hasattr(model, "named_modules") else ():
        for name, dim in getattr(module, "sharded", {}).items():
            if (shard := getattr(module, name)) is not None:
                key, local = f"{path}.{name}".lstrip("."), list(shard.shape)
                shape, offset = local.copy(), [0] * len(local)
                shape[dim] *= dist.get_world_size(module.group)
                offset[dim] = local[dim] * dist.get_rank(module.group)
                declared[key] = (
                    key,
                    shape,
                    {"offset": offset, "shape": local, "placement": f"Shard({dim})"},
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
