"""Display of distkit's and torch's errors in a notebook."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from types import TracebackType

import pytest
import torch.distributed as dist

from distkit.algorithms.all_reduce.ring import ring_all_reduce
from distkit.cluster.pickling import pack
from distkit.cluster.plan import make_plan
from distkit.ipython import shorten


def a_function() -> None:
    raise KeyError("own")


def shown(program: Callable[[], object]) -> tuple[str, list[str]]:
    """Return the message, and the functions in the traceback."""
    with pytest.raises(BaseException) as caught:
        program()
    tb = caught.value.__traceback__
    assert isinstance(tb, TracebackType)
    kind, error, tb = shorten(caught.value, tb)
    assert isinstance(error, kind)
    return str(error), [frame.name for frame in traceback.extract_tb(tb)]


@pytest.mark.parametrize("program", [dist.get_rank, lambda: ring_all_reduce(1)])
def test_notebook_is_not_a_rank(program: Callable[[], object]) -> None:
    message, frames = shown(program)
    assert message.startswith("this runs in the notebook, which is not a rank")
    assert set(frames) <= {"shown", "<lambda>"}


@pytest.mark.parametrize("given", [None, 3, [1]])
def test_result_is_not_a_function(given: object) -> None:
    message, frames = shown(lambda: pack(given, (), {}))
    assert "without parentheses: cluster.run(hello), not cluster.run(hello())" in message
    assert frames == ["shown", "<lambda>"]


def test_other_exceptions_are_unchanged() -> None:
    assert shown(a_function) == ("'own'", ["shown", "a_function"])
    message, frames = shown(lambda: make_plan("x", 0, "cpu", "gloo", cpus=1, memory=1).ranks)  # type: ignore[arg-type]
    assert "integer" in message and frames == ["shown", "<lambda>"]
    message, frames = shown(lambda: make_plan(1, 0, "cpu", "gloo", cpus=1, memory=""))  # type: ignore[arg-type]
    assert (
        "unsupported operand" in message and "_check_memory" in frames
    )  # a mistake in the library


def test_oversubscription_prints_a_notice() -> None:
    def crowd(ranks: int, cpus: int) -> str:
        return make_plan(ranks, 0, "cpu", "gloo", cpus=cpus, memory=10**12).oversubscription_warning

    assert crowd(16, 2) == crowd(219, 64) == ""
    assert crowd(219, 2).startswith("219 processes share 2 cores:")
    assert "Use at most 8 here, and dk.simulation.simulate for more ranks" in crowd(9, 1)
