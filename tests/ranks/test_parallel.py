"""Device meshes for layouts, and the shards of models on ranks."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import distkit as dk
from distkit_parallel import Layout, shards, split


def shards_of(entries: list[dict[str, Any]], name: str) -> list[tuple[Any, ...]]:
    (entry,) = [e for e in entries if e["name"] == name]
    return [tuple(shard.values()) for shard in entry["shards"]]


def test_mesh_follows_the_layout() -> None:
    layout = Layout(dp=2, tp=2)

    def program() -> tuple[list[int], list[int]]:
        mesh = layout.mesh()
        groups = [dist.get_process_group_ranks(mesh[axis].get_group()) for axis in ("dp", "tp")]
        return list(mesh.get_coordinate()), groups

    for rank, (position, groups) in enumerate(dk.run_ranks(program, 4).results):
        assert position == list(layout.coordinates(rank).values())
        for axis, group in zip(("dp", "tp"), groups, strict=True):
            fixed = "tp" if axis == "dp" else "dp"
            same = [
                r
                for r in range(4)
                if layout.coordinates(r)[fixed] == layout.coordinates(rank)[fixed]
            ]
            assert group == same
    with pytest.raises(dk.errors.RankError, match="needs 4 ranks, but this run has 2"):
        dk.run_ranks(program, 2)


def test_shards_of_a_three_dimensional_tensor_match_local_values() -> None:
    full = torch.arange(5 * 6 * 2.0).view(5, 6, 2)
    cases = [*product([Shard(0), Shard(1), Replicate()], [Shard(0), Shard(2), Replicate()])]

    def program() -> list[tuple[Any, torch.Tensor]]:
        mesh, found = init_device_mesh("cpu", (2, 2)), []
        for placements in cases:
            tensor = distribute_tensor(full, mesh, placements)
            found.append((shards(tensor, "x"), tensor.to_local()))
        return found

    results = dk.run_ranks(program, 4).results
    for i, placements in enumerate(cases):
        for rank, result in enumerate(results):
            entries, local = result[i]
            owner, offset, shape, placement = shards_of(entries, "x")[rank]
            assert owner == rank
            where = tuple(slice(o, o + s) for o, s in zip(offset, shape, strict=True))
            assert torch.equal(full[where], local)
            assert placement == ", ".join(
                f"Shard({p.dim})" if isinstance(p, Shard) else "Replicate()" for p in placements
            )


def test_shards_of_a_model_match_its_layout() -> None:
    """FSDP over tensor parallelism, pipeline stages, and partial sums."""

    def program() -> tuple[Any, ...]:
        mesh = Layout(dp=2, tp=2).mesh()
        model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
        stage = split(nn.Sequential(*(nn.Linear(2, 2) for _ in range(4))), 4)[dist.get_rank()]
        row = DTensor.from_local(torch.ones(3), mesh["tp"], [Partial()])
        uneven = nn.Linear(2 + dist.get_rank(), 1)
        with pytest.raises(ValueError, match=r"'weight' has shape \[1, 2\] on rank 0 and \[1, 3\]"):
            shards(uneven)
        return (
            shards(model),
            shards(stage),
            shards({"row": row}),
        )

    results = dk.run_ranks(program, 4).results
    assert all(result == results[0] for result in results)
    model, stages, row = results[0]
    assert [entry["shape"] for entry in model] == [[8, 6], [8], [3, 8], [3]]
    both = {tuple(p["offset"]) for e in model if e["name"] == "0.weight" for p in e["shards"]}
    assert both == {(0, 0), (2, 0), (4, 0), (6, 0)}
    assert shards_of(model, "1.bias")[-1] == (3, [2], [1], "Shard(0)")
    assert "    rank 3: [2:3] (1), Shard(0)" in repr(dk.simulation.ShardMap(model)).splitlines()
    assert [shards_of(stages, f"{s}.bias") for s in range(4)] == [
        [(s, [0], [2], "Replicate()")] for s in range(4)
    ]
    assert {shard[3] for shard in shards_of(row, "row")} == {"Partial(sum)"}
