"""Judges for exercises: formulas, schedules, and timing on busy machines."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any

import pytest
import torch
from answers import answer
from hypothesis import given, settings
from hypothesis import strategies as st

from distkit.algorithms.all_reduce.ring import schedule as ring
from distkit_course import values
from distkit_course.content.models import (
    broadcast_seconds,
    bytes_per_gpu,
    chunk_sent,
    crossover,
    order_1f1b,
)
from distkit_course.content.parameter_server import STEPS, simulate_training
from distkit_course.judges import time_criterion
from distkit_course.task import Criterion, Verdict
from distkit_parallel import PIPELINES, Layout, Transformer
from distkit_simulation import cost, job
from distkit_simulation.network import Link, Network
from distkit_simulation.simulator import finish_times

# -- staleness bounds ---------------------------------------------------------------------


@given(st.integers(1, 50), st.integers(0, 400))
def test_staleness_bound_is_the_smallest_that_avoids_waiting(step: int, pause: int) -> None:
    bound = answer("staleness_bound")(step, pause)
    waited, ahead = simulate_training(bound, step, pause)
    assert waited == 0 and ahead == min(bound, ahead)
    if 0 < bound < STEPS - 10:
        assert simulate_training(bound - 1, step, pause)[0] > 0 and ahead == bound


# -- models --------------------------------------------------------------------------------


@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 3), (2, 2), (4, 2), (4, 9)])
def test_solution_of_1f1b_equals_the_catalog(ranks: int, microbatches: int) -> None:
    orders = PIPELINES["1f1b"].orders(ranks, microbatches)
    solutions = [order_1f1b(rank, ranks, microbatches) for rank in range(ranks)]
    assert solutions == [[(a.kind, a.microbatch) for a in order] for order in orders]


@given(st.integers(1, 40), st.sampled_from([Link(1e-6, 1e-9), Link(5e-6, 8e-11)]))
def test_broadcast_time_equals_the_simulation(n: int, link: Link) -> None:
    simulated = finish_times("broadcast", n, 4000, Network(link)).max()
    assert math.isclose(broadcast_seconds(n, 4000, link), simulated, abs_tol=1e-12)


@pytest.mark.parametrize("n", [6, 8, 16])
def test_crossover_equals_the_cost_formulas(n: int) -> None:
    at = crossover(n, 1e-6, 1e-9)
    found = cost.crossovers(n, Link(1e-6, 1e-9), among=["tree", "ring"])
    assert [name for _, name in found] == ["tree", "ring"]
    assert math.isclose(found[1][0], at, rel_tol=1e-3)


@given(st.integers(2, 7))
def test_ring_chunks_equal_the_schedule(n: int) -> None:
    for step, one in enumerate(ring(n)):
        assert one.chunk.tolist() == [chunk_sent(int(rank), step, n) for rank in one.src]


@given(st.sampled_from([1, 2, 5]), st.sampled_from([1, 3]), st.sampled_from([1, 2, 4]))
def test_bytes_per_gpu_equal_the_simulated_memory(dp: int, pp: int, tp: int) -> None:
    model, layout = Transformer.gpt(12, 768, 12), Layout(dp=dp, pp=pp, tp=tp)
    memory = job.Job(model, layout, job.A100, batch=10, sequence=512, zero=1).stage_memory(0)
    assert math.isclose(
        bytes_per_gpu(model.layers * model.layer, dp, pp, tp),
        memory["parameters"] + memory["gradients"] + memory["optimizer"],
    )


# -- time ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ratio", "busy", "status"),
    [(2.0, False, "pass"), (2.0, True, "pass"), (1.0, False, "wasteful"), (1.0, True, "blocked")],
)
def test_failed_time_criterion_is_blocked_on_a_busy_machine(
    ratio: float, busy: bool, status: str
) -> None:
    noisy = [(1.0, ratio), (1.0, ratio), (9.0, ratio), (1.0, 9.0), (1.0, ratio)]
    assert time_criterion(noisy, 1.5, busy).status == status


def test_blocked_criterion_does_not_change_the_score() -> None:
    met, blocked = Criterion("values", "right"), Criterion("time", "too busy", "blocked")
    verdict = Verdict(
        "overlap", "blocked", (met, blocked), "Call it.\nThen: dk.check.f(g)", worth=2
    )
    assert (verdict.points, verdict.max, verdict.credit) == (1, 1, 2.0) and not verdict
    assert "– too busy" in repr(verdict) and all(
        text in verdict._repr_html_() for text in ("blocked", "<code>dk.check.f(g)</code></div>")
    )


# -- values that ranks send ------------------------------------------------------------------


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 62), 1 << 62)
    | st.floats(allow_nan=False)
    | st.text(),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers(0, 9), inner)
        | st.frozensets(st.integers(0, 9))
    ),
    max_leaves=8,
)


@settings(max_examples=50)
@given(PLAIN)
def test_plain_values_round_trip(value: Any) -> None:
    assert values.unpack(values.pack(value)) == value


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
def test_tensors_keep_shape_and_dtype(dtype: Any, shape: tuple[int, ...]) -> None:
    sent = torch.ones(shape, dtype=dtype)
    unpacked = values.unpack(values.pack([sent]))[0]
    assert (unpacked.dtype, unpacked.shape) == (dtype, shape) and torch.equal(unpacked, sent)


@given(st.binary())
def test_damaged_bytes_raise_only_decode_errors(packed: bytes) -> None:
    with suppress(*values.DECODE_ERRORS):
        repr(values.unpack(packed))
