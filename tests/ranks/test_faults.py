"""Fault injection: the requested faults occur on the named ranks only."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import distkit as dk
from distkit.cluster import Run
from distkit.events import Op, State
from distkit.recording import faults


def steps(n: int) -> list[float]:
    """Return the durations of n collectives on this rank [s]."""
    dist.barrier()
    times = []
    for _ in range(n):
        start = time.monotonic()
        dist.all_reduce(torch.ones(250))
        times.append(time.monotonic() - start)
    return times


def test_delay_makes_a_straggler() -> None:
    with dk.inject_faults(delay={1: 0.4}):
        run = dk.run_ranks(steps, 3, 3)
    assert all(min(times) > 0.25 for times in run.results)
    (finding,) = run.findings
    assert (finding.kind, finding.culprits) == ("straggler", (1,))
    assert not finding.hang


def test_injecting_faults_on_a_rank_raises() -> None:
    with pytest.raises(dk.errors.RankError, match="after the run had started"):
        dk.run_ranks(lambda: dk.inject_faults(delay={1: 1.0}).__enter__(), 2)


def test_slow_link_delays_the_sender() -> None:
    def message() -> float:
        x = torch.ones(25_000)  # 100 kB
        dist.barrier()
        start = time.monotonic()
        if dist.get_rank() == 0:
            dist.send(x, dst=1)
        elif dist.get_rank() == 1:
            dist.recv(x, src=0)
        return time.monotonic() - start

    with dk.inject_faults(latency=0.5, bandwidth=1e5):
        run = dk.run_ranks(message, 3)
    seconds = run.results
    assert 1.5 < seconds[0] < 10 and 1 < seconds[1] < 10  # latency + nbytes / bandwidth
    assert seconds[2] < 0.5, "a rank without messages has no delay"
    (sent,) = (s for s in run.trace.spans if s.op is Op.SEND)
    assert sent.seconds is not None and sent.seconds < 1, "the delay precedes the operation"


def test_rank_is_killed_after_n_communication_operations() -> None:
    message = (
        r"rank 1 .*inject_faults killed it, as requested\); last seen after all_reduce\(\) at "
    )
    with dk.inject_faults(kill={1: 4}), pytest.raises(dk.errors.RankDied, match=message) as caught:
        dk.run_ranks(steps, 3, 5)
    run = caught.value.run
    assert isinstance(run, Run)
    completed = [s.op for s in run.trace.spans if s.rank == 1 and s.state is State.COMPLETED]
    assert completed.count(Op.ALL_REDUCE) == 3
    assert [f.kind for f in run.findings if f.hang] == ["died"]


def test_faults_end_with_the_block() -> None:
    with pytest.raises(ZeroDivisionError), dk.inject_faults(delay={0: 1.0}):
        raise ZeroDivisionError
    assert faults.current() == faults.Faults()
    with dk.inject_faults(latency=1.0), dk.inject_faults(latency=2.0):
        assert faults.current().latency == 2.0
    assert max(max(times) for times in dk.run_ranks(steps, 2, 1).results) < 0.5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"delay": {3: 0.1}}, r"got rank 3, but the ranks are 0 to 1"),
        ({"kill": {-1: 0}}, r"got rank -1"),
    ],
)
def test_faults_on_unknown_ranks_raise(options: dict[str, Any], message: str) -> None:
    with dk.inject_faults(**options), pytest.raises(ValueError, match=message):
        dk.run_ranks(steps, 2, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"delay": {0: -1}}, r"expects finite numbers of seconds .*, not \[-1\]"),
        ({"delay": {0: "long"}}, "expects finite numbers of seconds"),
        ({"latency": math.nan}, "expects finite numbers of seconds"),
        ({"latency": math.inf}, "expects finite numbers of seconds"),
        ({"bandwidth": 0}, "bytes per second"),
        ({"bandwidth": -1.0}, "bytes per second"),
        ({"bandwidth": math.nan}, "bytes per second"),
        ({"kill": {0: -1}}, r"kill=…\) expects integers ≥ 0"),
        ({"kill": {0: 1.5}}, r"kill=…\) expects integers ≥ 0"),
        ({"bandwidth": "slow"}, "bytes per second"),
        ({"delay": {"0": 1, 7: 1}}, "got the key '0'"),
        ({"delay": {7: 1}}, "got rank 7"),
    ],
)
def test_invalid_faults_raise(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message), dk.inject_faults(**options):
        faults.current().check(2)


def test_unused_fault_is_reported() -> None:
    message = r"kill=\{1: 2\}\) had no effect: rank 1 ran only 2 .* its 3rd"

    def twice() -> None:
        dist.barrier()
        dist.barrier()

    with (
        dk.inject_faults(kill={1: 2}),
        pytest.warns(dk.errors.CommunicationWarning, match=message) as warned,
    ):
        dk.run_ranks(twice, 2)
    assert len(warned) == 1
