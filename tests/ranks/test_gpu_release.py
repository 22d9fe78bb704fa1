"""Release of a rank that waits for its GPU in C++, simulated by a future that ignores signals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import distkit as dk
from distkit.cluster import Run


class Pretended(dist.ProcessGroup):
    """A group like NCCL's: abort ends its operations on the device."""

    def __init__(self, stream: torch.futures.Future[Any]) -> None:
        super().__init__(dist.get_rank(), dist.get_world_size())
        self._stream = stream

    def abort(self) -> None:
        """End the kernels."""
        self._stream.set_result(None)


def on_a_device() -> torch.futures.Future[Any]:
    """Start an operation on the device, in a group of this rank."""
    from distkit.cluster.rank.rank import Rank

    group, stream = Rank.here.group, torch.futures.Future[Any]()
    group.spec = replace(group.spec, backend="nccl")
    group._groups.append(Pretended(stream))
    return stream


@pytest.mark.stand_in
def test_abort_frees_the_thread_that_waits_for_the_device() -> None:
    def program() -> None:
        stream = on_a_device()
        dist.barrier()
        if dist.get_rank() == 1:
            raise ValueError("this rank ends the run")
        stream.wait()  # like torch.cuda.synchronize(), which handles no Python signals

    with pytest.raises(dk.errors.RankError, match="rank 1 raised ValueError") as caught:
        dk.run_ranks(program, 2)
    assert isinstance(caught.value.run, Run)
    end = caught.value.run.trace.info.ends[0]
    assert (end.how, end.text) == ("released", "")  # without ending its process


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
