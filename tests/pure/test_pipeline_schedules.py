"""Pipeline schedules: torch's order, completeness, deadlocks, and invalid arguments."""

from __future__ import annotations

from collections import Counter
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distkit_parallel.schedules import (
    PIPELINES,
    Action,
    Orders,
    execution_order,
    gpipe,
    interleaved,
    one_f_one_b,
    zero_bubble,
)

RANKS, MICROBATCHES = range(1, 9), range(1, 17)
TORCH_CLASSES = {
    "interleaved": "ScheduleInterleaved1F1B",
    "zero_bubble": "ScheduleInterleavedZeroBubble",
}
several_stages = pytest.mark.parametrize("name", TORCH_CLASSES)
every_schedule = pytest.mark.parametrize("name", PIPELINES)


def orders(name: str, p: int, m: int, v: int) -> Orders:
    return PIPELINES[name].orders(p, m, v if PIPELINES[name].looped else 1)


# -- torch's own order ------------------------------------------------------------------


@pytest.fixture
def mocked_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Create torch's schedules with mocked stages, without messages."""
    from torch.distributed.pipelining import _schedule_visualizer as visualizer
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime as Runtime

    monkeypatch.setattr(visualizer.mock, "create_autospec", lambda *a, **k: SimpleNamespace())
    monkeypatch.setattr(Runtime, "_prepare_schedule_with_comms", lambda *a, **k: None)


def torch_orders(class_name: str, p: int, m: int, v: int) -> list[list[str]] | None:
    """Return torch's order without the final gradient reduction; None if torch raises."""
    from torch.distributed.pipelining import schedules
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    several = issubclass(getattr(schedules, class_name), schedules.PipelineScheduleMulti)
    stage = SimpleNamespace(group_rank=0, group_size=p, num_stages=p, submod=None)
    try:
        if several and v == 1:
            ranks = getattr(schedules, class_name)([stage], m).pipeline_order
            found = [ranks[rank] for rank in range(p)]
        else:
            found = get_schedule_ops(class_name.removeprefix("Schedule"), p, m, v)
    except ValueError:
        return None
    return [[str(a) for a in rank if a and a.computation_type.value in "FBIW"] for rank in found]


def as_text(orders: Orders) -> list[list[str]]:
    return [[str(action) for action in order] for order in orders]


@pytest.mark.usefixtures("mocked_stages")
@several_stages
def test_interleaved_order_equals_torch(name: str) -> None:
    compared = Counter()
    for p, m, v in product(RANKS, MICROBATCHES, (1, 2, 3, 4)):
        expected = torch_orders(TORCH_CLASSES[name], p, m, v)
        compared[expected is not None] += 1
        if expected is None:
            with pytest.raises(ValueError, match="of different sizes"):
                orders(name, p, m, v)
        else:
            assert as_text(orders(name, p, m, v)) == expected, (p, m, v)
    assert compared == {True: 424, False: 88}


@pytest.mark.usefixtures("mocked_stages")
def test_gpipe_order_equals_torch() -> None:
    for p, m in product(RANKS, MICROBATCHES):
        assert as_text(gpipe(p, m)) == torch_orders("ScheduleGPipe", p, m, 1)


@pytest.mark.usefixtures("mocked_stages")
def test_order_of_1f1b_equals_torch() -> None:
    """Torch numbers the last stage's forward passes from 1, although it runs them from 0."""
    for p, m in product(RANKS, MICROBATCHES):
        expected = torch_orders("Schedule1F1B", p, m, 1)
        assert (expected is None) == (m < p)
        if expected:
            orders = one_f_one_b(p, m)
            orders[-1] = [a._replace(microbatch=a.microbatch + (a.kind == "F")) for a in orders[-1]]
            assert as_text(orders) == expected, (p, m)


# -- completeness --------------------------------------------------------------------------

pipelines = st.tuples(st.integers(1, 8), st.integers(1, 33), st.integers(1, 4))


@every_schedule
@given(pipelines)
@settings(max_examples=60)
def test_every_micro_batch_is_computed_once_without_deadlock(
    name: str, case: tuple[int, int, int]
) -> None:
    p, m, v = case
    try:
        found = orders(name, p, m, v)
    except ValueError:
        assert m % max(1, m // p)
        return
    stages = p * v if PIPELINES[name].looped else p
    kinds = "FIW" if name.startswith("zero_bubble") else "FB"
    executed = list(execution_order(found))
    assert Counter(a for _, a in executed) == Counter(
        Action(s, k, i) for s, k, i in product(range(stages), kinds, range(m))
    )
    assert all(action.stage % p == rank for rank, action in executed)


def test_deadlocked_schedule_names_the_waiting_ranks() -> None:
    deadlocked = one_f_one_b(2, 2)
    deadlocked[0].insert(0, deadlocked[0].pop(1))  # a backward before the forward that it needs
    deadlocked[1].reverse()
    with pytest.raises(ValueError, match=r"never ends: .*rank 1 is stuck at 1B1 \(needs 1F1\)"):
        list(execution_order(deadlocked))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: gpipe(0, 1), "ranks=0"),
        (lambda: one_f_one_b(1, 0), "microbatches=0"),
        (lambda: interleaved(2, 2, 0), "chunks=0"),
        (lambda: interleaved(4, 9, 2), "9 micro-batches on 4 ranks would form 2 groups"),
        (lambda: zero_bubble(4, 9), "a multiple of 2, ideally of 4"),
        (lambda: PIPELINES["1f1b"].orders(4, 8, 2), "1F1B has one stage per rank, not 2"),
    ],
)
def test_invalid_schedule_raises(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
