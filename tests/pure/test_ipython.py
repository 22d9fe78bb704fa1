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


def raise_key_error() -> None:
    raise KeyError("own")


def displayed(program: Callable[[], object]) -> tuple[str, list[str]]:
    """Return the message, and the functions in the traceback."""
    with pytest.raises(BaseException) as caught:
        program()
    tb = caught.value.__traceback__
    assert isinstance(tb, TracebackType)
    kind, error, tb = shorten(caught.value, tb)
    assert isinstance(error, kind)
    return str(error), [frame.name for frame in traceback.extract_tb(tb)]


@pytest.mark.parametrize("program", [dist.get_rank, lambda: ring_all_reduce(1)])
def test_call_that_needs_a_rank_raises_in_the_notebook(program: Callable[[], object]) -> None:
    message, frames = displayed(program)
    assert message.startswith("this runs in the notebook, which is not a rank")
    assert set(frames) <= {"displayed", "<lambda>"}


@pytest.mark.parametrize("argument", [None, 3, [1]])
def test_result_instead_of_a_function_raises(argument: object) -> None:
    message, frames = displayed(lambda: pack(argument, (), {}))
    assert "without parentheses: cluster.run(hello), not cluster.run(hello())" in message
    assert frames == ["displayed", "<lambda>"]


def test_other_exceptions_are_unchanged() -> None:
    assert displayed(raise_key_error) == ("'own'", ["displayed", "raise_key_error"])
    message, frames = displayed(lambda: make_plan("x", 0, "cpu", "gloo", cpus=1, memory=1).ranks)  # type: ignore[arg-type]
    assert "integer" in message and frames == ["displayed", "<lambda>"]
    message, frames = displayed(lambda: make_plan(1, 0, "cpu", "gloo", cpus=1, memory=""))  # type: ignore[arg-type]
    assert "unsupported operand" in message and "_check_memory" in frames  # an error in distkit


def test_oversubscription_is_reported() -> None:
    def warning(ranks: int, cpus: int) -> str:
        return make_plan(ranks, 0, "cpu", "gloo", cpus=cpus, memory=10**12).oversubscription_warning

    assert warning(16, 2) == warning(219, 64) == ""
    assert warning(219, 2).startswith("219 processes share 2 cores:")
    assert "Use at most 8 here, and dk.simulation.simulate for more ranks" in warning(9, 1)
