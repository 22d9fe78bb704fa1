"""Release of ranks that are blocked in C++ on a GPU."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import distkit as dk


@pytest.mark.gpu(2)
@pytest.mark.parametrize("waits", ["item", "synchronize"])
def test_nccl_hangs_are_explained_and_leave_a_usable_cluster(waits: str) -> None:
    def hang(waits: str) -> None:
        x = torch.ones(1 << 20, device="cuda")
        if dist.get_rank() == 0:
            dist.all_reduce(x)
            x.sum().item() if waits == "item" else torch.cuda.synchronize()
        else:
            dist.recv(x, 0)
            torch.cuda.synchronize()

    def free() -> int:
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0]

    with dk.Cluster(2, backend="nccl") as cluster:
        before = cluster.run(free).results
        with pytest.raises(dk.errors.DeadlockError, match="all_reduce"):
            cluster.run(hang, waits)
        after = cluster.run(free).results
        assert all(now >= 0.95 * then for now, then in zip(after, before, strict=True))


@pytest.mark.gpu(2)
def test_next_run_works_after_a_death_in_an_nccl_collective() -> None:
    def program(fatal: bool) -> float:
        x = torch.ones(1 << 20, device="cuda")
        dist.all_reduce(x)
        torch.cuda.synchronize()
        if fatal and dist.get_rank() == 1:
            import os

            os.kill(os.getpid(), 9)
        dist.all_reduce(x)
        return float(x[0])

    with dk.Cluster(2, backend="nccl") as cluster:
        with pytest.raises(dk.errors.RankDied):
            cluster.run(program, fatal=True)
        assert cluster.run(program, fatal=False).results == [4.0, 4.0]
