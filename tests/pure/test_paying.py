"""When training with more ranks pays: the formulas, against each other and by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distkit.simulation import cost, plot_speedups, speedups
from distkit.simulation.paying import error

SECONDS = st.floats(1e-6, 1e3)
RANKS = st.integers(2, 1000)


def row(ranks: int, batch: int, compute: float, sync: float, step: float) -> dict[str, float]:
    return {"ranks": ranks, "batch": batch, "compute": compute, "sync": sync, "step": step}


@given(RANKS, SECONDS, SECONDS)
def test_an_epoch_is_shorter_exactly_where_it_pays(n: int, compute: float, sync: float) -> None:
    one, many = cost.epoch(1000, 10, 1, compute), cost.epoch(1000, 10, n, compute, sync)
    assert one / many == pytest.approx(cost.speedup(n, compute, sync))
    least = cost.break_even(compute, sync)
    assert (many < one) == (n > least) or n == pytest.approx(least)


@given(RANKS, SECONDS, SECONDS, SECONDS)
def test_a_prediction_is_that_of_the_epochs(
    n: int, alone: float, compute: float, sync: float
) -> None:
    compute = max(compute, alone)  # sharing a processor makes nothing quicker
    (_, found) = speedups([row(1, 8, alone, 0, alone), row(n, 8, compute, sync, 1.0)])
    expected = cost.epoch(1000, 8, 1, alone) / cost.epoch(1000, 8, n, compute, sync)
    assert found["predicted"] == pytest.approx(expected)
    assert found["measured"] == pytest.approx(n * alone)


def test_the_error_is_that_of_several_ranks() -> None:
    rows = [{"ranks": r, "predicted": p, "measured": 2.0} for r, p in ((1, 9), (2, 2.2), (4, 1.0))]
    assert error(rows) == 0.3


def test_speed_up_needs_one_rank() -> None:
    with pytest.raises(ValueError, match=r"no row of one rank with batch=16.*ranks=\[1, …\]"):
        speedups([row(1, 8, 1, 0, 1), row(2, 8, 1, 1, 2), row(2, 16, 1, 1, 2)])


def test_the_plot_has_a_line_of_predictions_and_dots_of_measurements() -> None:
    rows = [row(1, b, 1, 0, 1) for b in (8, 16)] + [row(2, b, 1, 1, 4) for b in (8, 16)]
    lines = plot_speedups(rows).axes[0].lines
    assert [[*line.get_ydata()] for line in lines[:4]] == [[1, 1], [1, 0.5]] * 2
