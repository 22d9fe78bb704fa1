"""distkit's all-reduce in place of torch's: dist.all_reduce, DDP, shared memory."""

from __future__ import annotations

import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import distkit as dk
from distkit.algorithms import shared_memory
from distkit.algorithms.contract import hosts_of
from distkit.algorithms.use import LARGE, implementation

OPS = ["SUM", "PRODUCT", "MIN", "MAX"]
LENGTHS = [0, 1, 5, 1000, shared_memory.SMALL // 4 + 1, shared_memory.SLOT // 2 + 3]
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int8]


def expected(x: torch.Tensor, op: str) -> torch.Tensor:
    """Return gloo's result."""
    dist.all_reduce(x, getattr(dist.ReduceOp, op))
    return x


def through_shared_memory() -> int:
    rank, checked = dist.get_rank(), 0
    for op in OPS:
        for length in LENGTHS:
            for dtype in DTYPES:
                x = (torch.arange(length) % 3 + rank % 2).to(dtype)
                correct = expected(x.clone(), op)
                dk.algorithms.shared_memory_all_reduce(x, getattr(dist.ReduceOp, op))
                torch.testing.assert_close(x, correct)
                checked += 1
    return checked


@pytest.mark.parametrize("n", [1, 4])
def test_shared_memory_equals_gloo(n: int) -> None:
    assert min(dk.run_ranks(through_shared_memory, n).results) > 100


def on_three_hosts() -> int:
    socket.gethostname = lambda: f"host {dist.get_rank() % 3}"
    os.environ.pop("LOCAL_WORLD_SIZE")  # ignore the launcher's variables
    return through_shared_memory()


def test_shared_memory_on_several_hosts_uses_a_ring() -> None:
    run = dk.run_ranks(on_three_hosts, 4)
    assert min(run.results) > 100
    assert {m.src for m in run.trace.messages} == {0, 1, 2}


def on_hosts(name: str, sizes: list[int], hosts: list[int]) -> tuple[bool, list[list[int]]]:
    """Return whether sums are correct on simulated hosts of these sizes, and each host's ranks."""
    host_of_rank = [h for h, n in enumerate(hosts) for _ in range(n)]
    socket.gethostname = lambda: f"host-{host_of_rank[dist.get_rank()]}"
    os.environ.pop("LOCAL_WORLD_SIZE")
    equal = True
    for size in sizes:
        x = torch.arange(size, dtype=torch.float64) + dist.get_rank()
        correct = expected(x.clone(), "SUM")
        with dk.algorithms.use_algorithm(name):
            dist.all_reduce(x)
        equal = equal and torch.equal(x, correct)
    return equal, [[*host] for host in hosts_of()]


@pytest.mark.parametrize("name", ["auto", "hierarchical", "shared_memory"])
def test_hosts_are_detected(name: str) -> None:
    sizes = [3, LARGE // 8, shared_memory.SLOT // 8 * 2 + 5]
    run = dk.run_ranks(on_hosts, 6, name, sizes, [3, 1, 2])
    assert run.results == [(True, [[0, 1, 2], [3], [4, 5]])] * 6
    assert not any(
        "distkit/host" in key for s in run.trace.spans for key in s.attributes.get("keys", ())
    )
    if name in ("shared_memory", "auto"):  # only leaders send
        assert {m.src for m in run.trace.messages} == {0, 3, 4}


def test_torus_needs_equal_hosts() -> None:
    assert dk.run_ranks(on_hosts, 4, "torus", [5], [2, 2]).results == [(True, [[0, 1], [2, 3]])] * 4
    with pytest.raises(dk.errors.RankError, match="same number of ranks on each host; got 1, 2"):
        dk.run_ranks(on_hosts, 3, "torus", [5], [1, 2])


def sum_in_shared_memory(lost: int) -> float:
    """Return the sum; one rank may be killed while the memory is created."""
    open_file = shared_memory._open_file

    def check_and_open(*where: Any) -> int:
        found = len([*Path("/dev/shm").glob("distkit-*")])
        if found or dist.get_rank() == lost:
            os.kill(os.getpid(), signal.SIGABRT if found else signal.SIGKILL)
        return open_file(*where)

    # between the creation of the memory and its opening
    shared_memory._open_file = check_and_open
    x = torch.ones(5)
    dk.algorithms.shared_memory_all_reduce(x)
    return x[0].item()


@pytest.mark.skipif(sys.platform != "linux", reason="needs unnamed memory (memfd)")
def test_shared_memory_files_are_unnamed() -> None:
    assert dk.run_ranks(sum_in_shared_memory, 2, -1).results == [2.0, 2.0]
    with pytest.raises(dk.errors.RankDied, match=r"rank 1(?s:.*)SIGKILL"):
        dk.run_ranks(sum_in_shared_memory, 2, 1)


def with_different_operations() -> None:
    op = dist.ReduceOp.MAX if dist.get_rank() else dist.ReduceOp.SUM
    dk.algorithms.shared_memory_all_reduce(torch.ones(70_000), op)


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (
            lambda: dk.algorithms.shared_memory_all_reduce(torch.ones(3 + dist.get_rank())),
            r"rank 0: SUM of float32\[3\]; rank 1: SUM of float32\[4\]",
        ),
        (
            with_different_operations,
            r"rank 0: SUM of float32\[70,000\]; rank 1: MAX of float32\[70,000\]",
        ),
    ],
)
def test_different_tensors_are_named(program, message) -> None:
    with pytest.raises(dk.errors.RankError, match=message):
        dk.run_ranks(program, 2)


def one_is_missing() -> None:
    with dk.algorithms.use_algorithm("shared_memory"):
        if dist.get_rank():
            dist.all_reduce(torch.ones(2))


def test_hang_in_shared_memory_is_explained() -> None:
    with pytest.raises(dk.errors.DeadlockError, match="rank 0 has finished without calling it"):
        dk.run_ranks(one_is_missing, 3)


def largest(name: str) -> tuple[list[float], list[float]]:
    x = torch.tensor([1.0, 2.0]) * dist.get_rank()
    with dk.algorithms.use_algorithm(name):
        dist.all_reduce(x, dist.ReduceOp.MAX)
        dist.all_reduce(y := x.clone(), async_op=True).wait()
    dist.barrier()
    dist.all_reduce(torch.ones(1))  # torch's again
    return x.tolist(), y.tolist()


@pytest.mark.parametrize("name", ["ring", "shared_memory", "auto"])
def test_dist_all_reduce_uses_the_algorithm(name: str) -> None:
    run = dk.run_ranks(largest, 3, name)
    assert run.results == [([2.0, 4.0], [6.0, 12.0])] * 3
    ops = [str(s.op) for s in run.trace.spans if s.rank == 0]
    assert ops.count("all_reduce") == 3 and ops[-1] == "all_reduce"
    assert ("send" in ops) == (name not in ("shared_memory", "auto"))


def gather_and_sum(x: torch.Tensor, op: object, group: object) -> None:
    gathered = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, x)
    x.copy_(torch.stack(gathered).sum(0))


def with_custom_function() -> float:
    x = torch.ones(1)
    with dk.algorithms.use_algorithm(gather_and_sum):
        dist.all_reduce(x)
    return x.item()


def test_custom_function_is_used() -> None:
    assert dk.run_ranks(with_custom_function, 3).results == [3.0] * 3


def test_unknown_name_raises() -> None:
    with pytest.raises(ValueError, match=r'unknown all-reduce "star".*"auto", .*"ring"'):
        implementation("star")


def test_use_outside_a_run_raises() -> None:
    with pytest.raises(RuntimeError, match="inside the function that runs on the ranks"):
        with dk.algorithms.use_algorithm("ring"):
            pass


def train(algorithm: str) -> list[float]:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    ddp = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    (x,) = dk.data.shard(torch.randn(24, 4))

    def step() -> None:
        optimizer.zero_grad()
        F.mse_loss(ddp(x), x[:, :2]).backward()
        optimizer.step()

    for _ in range(3):
        if algorithm:
            with dk.algorithms.use_algorithm(algorithm):
                step()
        else:
            step()
    return torch.cat([w.detach().flatten() for w in net.parameters()]).tolist()


@pytest.mark.parametrize("algorithm", ["ring", "auto"])
def test_ddp_equals_torch(algorithm: str) -> None:
    plain = dk.run_ranks(train, 2, "").results
    results = dk.run_ranks(train, 2, algorithm).results
    assert results[0] == results[1]
    torch.testing.assert_close(torch.tensor(results[0]), torch.tensor(plain[0]))
