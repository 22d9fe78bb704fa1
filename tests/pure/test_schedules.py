"""Schedules, proved by counting whose contributions each rank holds."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from distkit.algorithms.schedules import held, ring


@given(st.integers(1, 29))
def test_a_ring_leaves_every_contribution_once_everywhere(n: int) -> None:
    assert (held(ring(n), n) == 1).all()


@given(st.integers(2, 29))
def test_a_ring_takes_the_fewest_bytes(n: int) -> None:
    rounds = list(ring(n))
    assert len(rounds) == 2 * (n - 1)
    for t in rounds:
        assert sorted(t.src) == sorted(t.dst) == list(range(n))  # everybody sends one chunk


def test_a_missing_round_is_noticed() -> None:
    assert not (held(list(ring(4))[:-1], 4) == 1).all()
    doubled = [*ring(4), next(ring(4))]
    assert held(doubled, 4).max() == 2
    assert np.array_equal(held([], 3)[0, 0], [1, 0, 0])
