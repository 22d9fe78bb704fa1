"""Display of distkit's and torch's errors in a notebook."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch.distributed as dist

from distkit.algorithms.all_reduce.ring import ring_all_reduce
from distkit.cluster.pickling import pack
from distkit.cluster.plan import make_plan
from distkit.ipython import _with_short_errors


def displayed(program: Callable[[], object]) -> str | None:
    """Return the user's line and the message, or None if IPython shows the whole traceback."""
    with pytest.raises(BaseException) as caught:
        program()
    show = _with_short_errors(lambda kind, error, tb: None)
    shown: list[str] | None = show(caught.type, caught.value, caught.value.__traceback__)
    return shown and "".join(shown)


@pytest.mark.parametrize("program", [dist.get_rank, lambda: ring_all_reduce(1)])
def test_call_that_needs_a_rank_raises_in_the_notebook(program: Callable[[], object]) -> None:
    shown = str(displayed(program))
    assert re.match(r"----> \d+ (program\(\)|.*ring_all_reduce)", shown)
    assert "this runs in the notebook, which is not a rank" in shown


@pytest.mark.parametrize("argument", [None, 3, [1]])
def test_result_instead_of_a_function_raises(argument: object) -> None:
    shown = str(displayed(lambda: pack(argument, (), {})))
    assert re.match(r"----> \d+ .*pack\(argument", shown)
    assert "without parentheses: cluster.run(hello), not cluster.run(hello())" in " ".join(
        shown.split()
    )


def test_other_exceptions_are_unchanged() -> None:
    assert displayed(lambda: dict[str, int]()["own"]) is None
    shown = displayed(lambda: make_plan("x", 0, "cpu", "gloo", cpus=1, memory=1).ranks)  # type: ignore[arg-type]
    assert "integer" in str(shown)
    # an error inside distkit
    assert displayed(lambda: make_plan(1, 0, "cpu", "gloo", cpus=1, memory="")) is None  # type: ignore[arg-type]


def test_oversubscription_is_reported() -> None:
    def warning(ranks: int, cpus: int) -> str:
        return make_plan(ranks, 0, "cpu", "gloo", cpus=cpus, memory=10**12).oversubscription_warning

    assert warning(16, 2) == warning(219, 64) == ""
    assert warning(219, 2).startswith("219 processes share 2 cores:")
    assert "Use at most 8 here, and dk.simulation.simulate for more ranks" in warning(9, 1)
