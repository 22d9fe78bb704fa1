"""A thousand schedules of faults at random, and those that Hypothesis finds."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from tests.stress.kvstore.schedules import EVENTS, MODES, Schedule, at_random, happen


@pytest.mark.parametrize("seed", range(0, 1000, 100))
def test_every_acknowledged_push_counts_once(seed: int) -> None:
    assert {s: wrong for s in range(seed, seed + 100) if (wrong := at_random(s))} == {}


class Faults(RuleBasedStateMachine):
    """Hypothesis says what happens next."""

    @initialize(mode=st.sampled_from(MODES), replication=st.integers(1, 2))
    def start(self, mode: str, replication: int) -> None:
        self.schedule = Schedule(mode, replication)

    @rule(event=st.sampled_from([*EVENTS]), chance=st.randoms(use_true_random=False))
    def happens(self, event: str, chance) -> None:
        happen(self.schedule, event, chance)

    def teardown(self) -> None:
        if hasattr(self, "schedule"):
            assert self.schedule.end() == []


Faults.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
test_every_acknowledged_push_counts_once_in_the_shortest_schedule = Faults.TestCase
