"""Random correct programs cause no false alarm; ``make stress`` runs two hundred."""

from __future__ import annotations

from random import Random

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from distkit.cluster.runs import conductor
from distkit.recording import recorder
from tests.stress import random_programs
from tests.stress.random_programs import (
    Collective,
    Message,
    Program,
    Round,
    false_alarm,
    play,
    program,
)

SEEDS = st.randoms(use_true_random=False)


@settings(max_examples=6, deadline=None)
@given(SEEDS)
def test_correct_program_has_no_findings(rng: Random) -> None:
    assert false_alarm(program(rng)) == ""


def play_with_early_reports(rounds: Program) -> None:
    """Run the program on this rank, and report every wait that exceeds a millisecond."""
    recorder.BLOCKED_AFTER, recorder.MAX_PERIOD = 0.001, 0.002
    play(rounds)


@settings(
    max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(rng=SEEDS)
def test_early_reports_of_waits_cause_no_finding(
    rng: Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conductor, "CHECK_INTERVAL", 0.002)
    assert false_alarm(program(rng), play=play_with_early_reports) == ""


def test_programs_are_varied() -> None:
    steps = [s for n in range(50) for round in program(Random(n)) for s in round.steps]
    messages = [s for s in steps if isinstance(s, Message)]
    collectives = [s for s in steps if isinstance(s, Collective)]
    assert {c.name for c in collectives} == set(random_programs.CALLS)
    assert len({(m.anyone, m.sends_later, m.receives_later) for m in messages}) == 8
    assert {len(s.group) for s in steps} == {0, 2}
    for s in steps:
        assert all(0 <= r < random_programs.RANKS for r in s.group)
    assert all({m.src, m.dst} == set(m.group) for m in messages if m.group)


def test_incorrect_program_has_a_finding() -> None:
    no_delays = (0.0,) * random_programs.RANKS
    first, second = (Message(0, 1, tag, 3, 0, (), False, False) for tag in (1, 7))

    def swap_messages(rounds: Program) -> None:
        play([Round(no_delays, (second, first))] if dist.get_rank() == 1 else rounds)

    assert "rank 1 waits for tag 7" in false_alarm(
        [Round(no_delays, (first, second))], play=swap_messages
    )

    def send_half(rounds: Program) -> None:
        if dist.get_rank() == 0:
            dist.send(torch.ones(1, dtype=torch.float64), dst=1)
        elif dist.get_rank() == 1:
            dist.recv(torch.ones(2), src=0)

    assert "float64[1]" in false_alarm([], play=send_half)
