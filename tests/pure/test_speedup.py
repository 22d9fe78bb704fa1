"""Speedup formulas, compared with each other and with values computed by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distkit_simulation import cost, plot_prediction, predict, speedups

SECONDS = st.floats(1e-6, 1e3)
RANKS = st.integers(2, 1000)


def row(ranks: int, batch: int, compute: float, sync: float, step: float) -> dict[str, float]:
    return {"ranks": ranks, "batch": batch, "compute": compute, "sync": sync, "step": step}


@given(RANKS, SECONDS, SECONDS)
def test_epoch_is_shorter_above_the_break_even_point(n: int, compute: float, sync: float) -> None:
    one, many = cost.epoch(1000, 10, 1, compute), cost.epoch(1000, 10, n, compute, sync)
    assert one / many == pytest.approx(cost.speedup(n, compute, sync))
    break_even = cost.break_even(compute, sync)
    assert (many < one) == (n > break_even) or n == pytest.approx(break_even)


@given(RANKS, SECONDS, SECONDS, SECONDS)
def test_prediction_equals_the_ratio_of_epochs(
    n: int, single: float, compute: float, sync: float
) -> None:
    compute = max(compute, single)  # sharing a processor makes nothing faster
    (_, found) = speedups([row(1, 8, single, 0, single), row(n, 8, compute, sync, 1.0)])
    expected = cost.epoch(1000, 8, 1, single) / cost.epoch(1000, 8, n, compute, sync)
    assert found["predicted"] == pytest.approx(expected)
    assert found["measured"] == pytest.approx(n * single)


def test_speedup_needs_a_row_with_one_rank() -> None:
    with pytest.raises(ValueError, match=r"batch=16 has no row with ranks=1.*ranks=\[1, …\]"):
        speedups([row(1, 8, 1, 0, 1), row(2, 8, 1, 1, 2), row(2, 16, 1, 1, 2)])


TIMES = st.floats(1e-3, 10.0)


@given(st.lists(TIMES, min_size=12, max_size=12), st.integers(1, 3), st.integers(0, 1), TIMES)
def test_measured_setting_is_predicted_from_its_parts(
    times: list[float], n: int, index: int, latency: float
) -> None:
    settings = [(ranks, batch) for ranks in (1, 2, 3) for batch in (8, 16)]
    rows = [
        row(ranks, batch, compute, sync * (ranks > 1), compute + sync)
        for (ranks, batch), compute, sync in zip(settings, times[:6], times[6:], strict=True)
    ]
    batch = (8, 16)[index]
    (measured,) = (r for r in speedups(rows) if (r["ranks"], r["batch"]) == (n, batch))
    assert predict(rows, ranks=n, batch=batch)["predicted"] == pytest.approx(measured["predicted"])
    slower = predict(rows, ranks=n, batch=batch, nbytes=500, latency=latency, bandwidth=1000)
    slowed = {**measured, "sync": measured["sync"] + (latency + 0.5) * (n > 1)}
    others = [r for r in rows if (r["ranks"], r["batch"]) != (n, batch)]
    (expected,) = (
        r for r in speedups([*others, slowed]) if r["ranks"] == n and r["batch"] == batch
    )
    assert slower["predicted"] == pytest.approx(expected["predicted"])
    assert slower["break_even"] == pytest.approx(expected["break_even"])


SWEPT = [row(r, b, b / 8, float(r > 1), b / 8 + (r > 1)) for r in (1, 2, 4) for b in (8, 24)]


def test_predictions_interpolate_and_do_not_extrapolate() -> None:
    found = predict(SWEPT, ranks=3, batch=16)
    assert (found["compute"], found["sync"], found["predicted"]) == (2, 1, 2)
    assert found["break_even"] == 1.5
    for outside, message in (
        ({"batch": 32}, "measured range, 8 to 24"),
        ({"ranks": 8}, "measured range, 1 to 4"),
    ):
        with pytest.raises(ValueError, match=message):
            predict(SWEPT, **{"ranks": 2, "batch": 8, **outside})


def test_plot_of_one_setting_shows_prediction_and_measurement() -> None:
    slow = {"latency": 1.0, "bandwidth": 1000.0}
    runs = [
        {**row(2, 16, 2, 2.5, 5.0), **slow},
        {**row(2, 16, 2, 1, 4.0), "latency": 0.0, "bandwidth": 1000.0},
        {**row(4, 16, 2, 2.5, 4.0), **slow},
    ]
    figure = plot_prediction(SWEPT, runs, ranks=2, batch=16, nbytes=500, **slow)
    line, marked, others, this_run, *_ = figure.axes[0].lines
    assert [*line.get_ydata()] == pytest.approx([1, 2 * 2 / 4.5, 3 * 2 / 4.5, 4 * 2 / 4.5])
    assert [*marked.get_xydata()[0]] == pytest.approx([2, 2 * 2 / 4.5])
    assert others.get_xydata().tolist() == [[2, 1.0]]
    assert this_run.get_xydata().tolist() == [[2, 2 * 2 / 5], [4, 2.0]]
    title = figure.axes[0].get_title(loc="left")
    assert title == (
        "2 ranks: predicted speedup 0.89, measured 0.80\npredicted step: 2 s compute + 2.5 s sync"
    )
