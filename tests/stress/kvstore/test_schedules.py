"""A thousand random fault schedules, and schedules that Hypothesis generates."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from tests.stress.kvstore.schedules import (
    EVENTS,
    MODES,
    Schedule,
    apply_event,
    random_schedule_errors,
)


@pytest.mark.parametrize("seed", range(0, 1000, 100))
def test_every_acknowledged_push_counts_once(seed: int) -> None:
    assert {
        s: errors for s in range(seed, seed + 100) if (errors := random_schedule_errors(s))
    } == {}


class Faults(RuleBasedStateMachine):
    """A schedule whose events Hypothesis chooses."""

    @initialize(mode=st.sampled_from(MODES), replication=st.integers(1, 2))
    def start(self, mode: str, replication: int) -> None:
        self.schedule = Schedule(mode, replication)

    @rule(event=st.sampled_from([*EVENTS]), rng=st.randoms(use_true_random=False))
    def apply(self, event: str, rng) -> None:
        apply_event(self.schedule, event, rng)

    def teardown(self) -> None:
        if hasattr(self, "schedule"):
            assert self.schedule.finish() == []


Faults.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
test_every_acknowledged_push_counts_once_in_generated_schedules = Faults.TestCase
