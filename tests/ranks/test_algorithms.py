"""The pages: equal to torch's own, equal to their schedule, equal to one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import distkit as dk
from distkit import demos
from distkit.algorithms.schedules import ring
from distkit.events import Op


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_ring_all_reduce_equals_torchs_own(n: int) -> None:
    def program() -> list[tuple[torch.Tensor, torch.Tensor]]:
        pairs = []
        for size in (12, 13, 1, 0):
            torch.manual_seed(dist.get_rank())
            ours = torch.randint(-99, 99, (size,)).float()  # whole numbers: sums are exact
            theirs = ours.clone()
            dk.ring_all_reduce(ours)
            dist.all_reduce(theirs)
            pairs.append((ours, theirs))
        return pairs

    for pairs in dk.run_ranks(program, n).results:
        assert all(torch.equal(ours, theirs) for ours, theirs in pairs)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_the_recorded_ring_is_its_schedule(n: int) -> None:
    """The k-th message of each rank goes where the figure says, and carries that chunk."""

    def program() -> None:
        # chunk c of every rank holds c+1 numbers, so that its size tells which one moves
        sizes = torch.arange(1, dist.get_world_size() + 1).tolist()
        x = torch.ones(sum(sizes))
        x.tensor_split = lambda n: torch.Tensor.split(x, sizes)  # type: ignore[method-assign]
        x.view = lambda *shape: x  # type: ignore[method-assign, assignment]
        dk.ring_all_reduce(x)

    trace = dk.run_ranks(program, n).trace
    for rank in range(n):
        sends = [s for s in trace.spans if s.rank == rank and s.op is Op.SEND]
        recorded = [(s.peer, s.nbytes // 4 - 1) for s in sorted(sends, key=lambda s: s.seq)]
        drawn = [(int(t.dst[rank]), int(t.chunk[rank])) for t in ring(n)]
        assert recorded == drawn


@pytest.mark.parametrize("all_reduce", [None, dk.ring_all_reduce], ids=["native", "ring"])
def test_synchronous_sgd_equals_one_process(all_reduce: object) -> None:
    results = dk.run_ranks(demos.train_in_step, 3, 1, all_reduce).results
    weights = [r["weights"] for r in results]
    assert all(torch.equal(w, weights[0]) for w in weights)
    alone = demos.train_alone(3, 1)
    assert torch.allclose(weights[0], alone["weights"], atol=1e-6)
    losses = torch.tensor([r["losses"] for r in results]).mean(0)
    assert torch.allclose(losses, torch.tensor(alone["losses"]), atol=1e-5)


def test_weights_are_sent_from_rank_0() -> None:
    def program() -> torch.Tensor:
        torch.manual_seed(dist.get_rank())
        net = torch.nn.Linear(3, 2)
        dk.sync_initial_weights(net)
        return torch.cat([w.detach().reshape(-1) for w in net.parameters()])

    one, two = dk.run_ranks(program, 2).results
    assert torch.equal(one, two)


def test_shards_are_equal_and_disjoint() -> None:
    shards = dk.run_ranks(lambda: dk.shard(torch.arange(11))[0].tolist(), 3).results
    assert shards == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]


def test_the_digits_are_scikit_learns() -> None:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    ours = demos.digits()
    assert torch.equal(ours[0] * 16, torch.tensor(images, dtype=torch.float32))
    assert torch.equal(ours[1], torch.tensor(labels))
