"""The parts of a step, measured on real ranks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import distkit as dk
from distkit.events import Op, State


def parts(steps: int = 2, blocks: int = 1) -> tuple[dict[str, float], bool, int]:
    images, labels = dk.data.digits()
    net, threads = dk.demos.model(), torch.get_num_threads()
    before = [w.detach().clone() for w in net.parameters()]
    found = dk.simulation.measure_step(
        net, (images[:8], labels[:8]), F.cross_entropy, steps=steps, blocks=blocks
    )
    trained = not any(map(torch.equal, before, net.parameters()))
    return found, trained, torch.get_num_threads() - threads


def test_step_is_split_into_parts() -> None:
    run = dk.run_ranks(parts, 2)
    for found, trained, threads in run.results:
        assert [*found] == ["compute", "sync", "step"] and min(found.values()) > 0
        assert trained and threads == 0
    gradients = [  # smaller all-reduces find the slowest rank
        s for s in run.trace.spans if s.rank == 0 and s.op is Op.ALL_REDUCE and s.nbytes > 8
    ]
    assert len(gradients) == 2 * 2 * 2  # sync and step, two blocks of two steps
    assert len({s.nbytes for s in gradients}) == 1 and gradients[0].state is State.COMPLETED


def test_single_rank_sends_nothing() -> None:
    found, _, _ = dk.run_ranks(parts, 1).results[0]
    assert found["sync"] == 0 and found["step"] == found["compute"] > 0


@pytest.mark.parametrize("ranks", [1, 2])
def test_slow_network_increases_only_communication_time(ranks: int) -> None:
    with dk.inject_faults(latency=0.2):
        found, _, _ = dk.run_ranks(parts, ranks, steps=1).results[0]
    assert found["compute"] < 0.2 and (ranks == 1 or min(found["sync"], found["step"]) >= 0.2)


@pytest.mark.parametrize("options", [{"steps": 0}, {"blocks": 0}])
def test_empty_measurement_raises(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="steps and blocks must be at least 1"):
        parts(**options)
