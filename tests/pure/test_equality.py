"""dk.equal: the first difference between two recorded training runs."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import pytest
import torch
import traces
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from test_views_gradients import MEAN, training_trace

import distkit as dk
from distkit.diagnosis.equality import ROUNDING, TOLERANCES
from distkit.recording import recorder
from distkit.recording.recorder import Recorder, to_table
from distkit.trace.trace import Trace

SUM = [2 * v for v in MEAN]


def test_identical_training_runs_are_equal() -> None:
    found = dk.equal(training_trace([MEAN, MEAN]), training_trace([MEAN, MEAN]))
    assert found
    assert found.exact
    assert repr(found) == "Bitwise equal in all 2 steps and 1 parameter"


def test_rounding_is_not_a_difference() -> None:
    other = [[v * (1 + 1e-6) for v in MEAN]] * 2
    found = dk.equal(training_trace([MEAN, MEAN]), training_trace(other))
    assert found
    assert not found.exact
    assert found.largest == pytest.approx(1e-6, rel=0.1)
    text = r"Equal in all 2 steps and 1 parameter; the largest .* is \S+ of the largest value"
    assert re.fullmatch(text, repr(found))
    assert not dk.equal(training_trace([MEAN, MEAN]), training_trace(other), rtol=1e-9)


@pytest.mark.parametrize(
    ("averages", "crcs", "what", "rank", "text"),
    [
        ([SUM, SUM], ("aaaa", "aaaa"), "gradient", 0, "one is 2 times the other, as for a sum"),
        (
            [MEAN, [9.0, 0.5, 1.0, -1.0]],
            ("aaaa", "aaaa"),
            "gradient",
            1,
            "w differs by 7 on rank 1",
        ),
        (
            [MEAN, [2.0, 0.5, 1.0, math.nan]],
            ("aaaa", "aaaa"),
            "gradient",
            1,
            "w is NaN or infinite in one",
        ),
        ([MEAN, MEAN], ("aaaa", "bbbb"), "weights", 1, r"differ by 8 on rank 1 \(update\)"),
    ],
)
def test_first_difference_is_named(
    averages: Sequence[list[float]], crcs: tuple[str, str], what: str, rank: int, text: str
) -> None:
    found = dk.equal(training_trace(averages, crcs=crcs), training_trace([MEAN, MEAN]))
    assert not found
    assert (found.first.step, found.first.what, found.first.rank) == (1, what, rank)
    assert re.search(f"^Different: in step 1 the {what}.*{text}", repr(found))


def record_training(
    dtype: torch.dtype, seed: int, steps: int, lr: float, noise: float = 0.0
) -> Trace:
    """Record training in one process, with gradients that do not depend on the weights.

    The gradients have relative errors up to ``noise``, as if summed in another order.
    """
    random = torch.Generator().manual_seed(seed)
    model = torch.nn.Linear(9, 7).to(dtype)
    for w in model.parameters():
        w.data = torch.randn(w.shape, generator=random).to(dtype)
    gradients = [[torch.randn(w.shape, generator=random) for w in model.parameters()]] * steps
    noise_generator = torch.Generator().manual_seed(seed + 1)
    recorder.set_current(rec := Recorder(0))
    try:
        with dk.watch_gradients(model) as watch:
            for step in gradients:
                model.zero_grad()
                for w, g in zip(model.parameters(), step, strict=True):
                    g = g * (1 + noise * torch.rand(g.shape, generator=noise_generator))
                    (w * g.to(dtype)).sum().backward()
                    w.data.add_(w.grad, alpha=-lr)
                watch.step(loss=1.0, samples=1)
    finally:
        recorder.set_current(None)
    return Trace(to_table(0, rec.drain()), traces.info(world_size=1))


DTYPES = st.sampled_from([torch.float64, torch.float32, torch.bfloat16])
RATES = st.floats(1e-6, 1.0)


@settings(max_examples=40, deadline=None)
@given(DTYPES, st.integers(0, 9), st.integers(1, 70), RATES)
def test_differences_from_summation_order_are_tolerated(
    dtype: torch.dtype, seed: int, steps: int, lr: float
) -> None:
    noise = 0.2 * TOLERANCES[str(dtype)[6:]]
    found = dk.equal(*(record_training(dtype, seed, steps, lr, noise=n) for n in (0.0, noise)))
    assert found, found.first


@settings(max_examples=40, deadline=None)
@given(DTYPES, st.integers(0, 9), st.integers(1, 70), RATES, st.floats(1.05, 1000.0))
def test_small_learning_rate_difference_is_found(
    dtype: torch.dtype, seed: int, steps: int, lr: float, factor: float
) -> None:
    """The difference must exceed the rounding of the weights."""
    name = str(dtype)[6:]
    assume((factor - 1) * lr > 3 * ROUNDING[name] and factor - 1 > 3 * factor * TOLERANCES[name])
    found = dk.equal(
        record_training(dtype, seed, steps, lr), record_training(dtype, seed, steps, factor * lr)
    )
    assert (found.first.step, found.first.what) == (1, "weights")
    assert "(update); norms: " in found.first.text


def test_step_counts_and_shapes_are_compared() -> None:
    short, long = training_trace([MEAN, MEAN]), training_trace([MEAN, MEAN], steps=5)
    assert "the number of steps: 2 and 5" in repr(dk.equal(short, long))
    assert dk.equal(short, long).first.step == 3


def test_unwatched_loop_raises() -> None:
    with pytest.raises(
        ValueError, match=r"the second run has not recorded any training.*watch_gradients"
    ):
        dk.equal(training_trace([MEAN, MEAN]), Trace())
