"""dk.equal: which of two recorded trainings' losses, gradients and weights differ first."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import pytest
from test_views_gradients import MEAN, trained

import distkit as dk
from distkit.trace.trace import Trace

SUM = [2 * v for v in MEAN]


def test_equal_to_the_bit() -> None:
    found = dk.equal(trained([MEAN, MEAN]), trained([MEAN, MEAN]))
    assert found
    assert found.exact
    assert repr(found) == "equal to the bit: 2 steps, 1 layer, 2 ranks"


def test_rounding_is_no_difference() -> None:
    other = [[v * (1 + 1e-6) for v in MEAN]] * 2
    found = dk.equal(trained([MEAN, MEAN]), trained(other))
    assert found
    assert not found.exact
    assert found.largest == pytest.approx(1e-6, rel=0.1)
    assert not dk.equal(trained([MEAN, MEAN]), trained(other), rtol=1e-9)


@pytest.mark.parametrize(
    ("afters", "crcs", "what", "rank", "says"),
    [
        ([SUM, SUM], ("aaaa", "aaaa"), "gradient", 0, "one is 2 times the other: a sum"),
        ([MEAN, [9.0, 0.5, 1.0, -1.0]], ("aaaa", "aaaa"), "gradient", 1, "w is 7 apart on rank 1"),
        (
            [MEAN, [2.0, 0.5, 1.0, math.nan]],
            ("aaaa", "aaaa"),
            "gradient",
            1,
            "w is NaN or infinite in one",
        ),
        ([MEAN, MEAN], ("aaaa", "bbbb"), "weights", 1, r"apart on rank 1 \(update\)"),
    ],
)
def test_the_first_difference_is_named(
    afters: Sequence[list[float]], crcs: tuple[str, str], what: str, rank: int, says: str
) -> None:
    found = dk.equal(trained(afters, crcs=crcs), trained([MEAN, MEAN]))
    assert not found
    assert (found.first.step, found.first.what, found.first.rank) == (1, what, rank)
    assert re.search(f"^different: in step 1 the {what}.*{says}", repr(found))


def test_numbers_of_steps_and_shapes_are_compared() -> None:
    some, more = trained([MEAN, MEAN]), trained([MEAN, MEAN], steps=5)
    assert "the number of steps: 2 and 5" in repr(dk.equal(some, more))
    assert dk.equal(some, more).first.step == 3


def test_a_loop_that_nobody_watched() -> None:
    with pytest.raises(ValueError, match=r"the second run has no record.*watch_gradients"):
        dk.equal(trained([MEAN, MEAN]), Trace())


def test_a_saved_trace_is_as_good(tmp_path) -> None:
    trace = trained([MEAN, MEAN])
    assert dk.equal(Trace.load(trace.save(tmp_path / "one.trace")), trace).exact
