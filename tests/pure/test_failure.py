"""Exceptions as plain data, even of classes that misbehave, and the cause of a failed run."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import traces

from distkit.cluster.runs import report
from distkit.cluster.runs.outcome import (
    MAX_FRAMES,
    MAX_TEXT,
    Failure,
    Outcome,
    describe,
    printable,
    rank_ends,
)
from distkit.trace.trace import Trace
from tests.stress.misuse import catalog


def catch(act: Callable[[], Any]) -> BaseException:
    try:
        act()
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


HOSTILE = {
    name: misuse
    for name, misuse in catalog.ALL.items()
    if name.startswith("raises_")
    and "hangs" not in name
    and misuse.other is None
    and "torch" not in name
    and "waits" not in name
    and name != "raises_in_a_thread"
}


@pytest.mark.parametrize("name", HOSTILE)
def test_every_exception_is_reported(name: str) -> None:
    failure = describe(catch(HOSTILE[name].fn), released=False)
    assert pickle.loads(pickle.dumps(failure)) == failure
    texts = [failure.type, failure.text, failure.cause or ""]
    assert all(
        type(text) is str and text[:MAX_TEXT] == printable(text[:MAX_TEXT]) for text in texts
    )
    assert len(failure.text) < 2 * MAX_TEXT and len(failure.frames) <= MAX_FRAMES
    first = run_error_text(Outcome(1, error=failure)).partition("\n")[0]
    assert first.startswith(f"rank 1 raised {failure.type}") and "catalog.py:" in first


def test_long_message_is_truncated_with_a_note() -> None:
    failure = describe(catch(catalog.raises_with_a_huge_message), released=False)
    assert failure.text == "x" * MAX_TEXT + " … (49980000 more characters)"
    assert "ValueError: " + 187 * "x" + "… at " in run_error_text(Outcome(1, error=failure))


def test_deep_recursion_is_abbreviated() -> None:
    def deeper() -> None:
        deeper()

    failure = describe(catch(deeper), released=False)
    assert failure.type == "RecursionError" and failure.frames[-1][2] == "deeper"
    message = run_error_text(Outcome(1, error=failure))
    assert "[Previous line repeated " in message and len(message) < 1500


# -- the first cause --------------------------------------------------------------------


def raised(rank: int, error: BaseException | None = None) -> Outcome:
    return Outcome(rank, error=describe(error or catch(catalog.raise_it), released=False))


def died(rank: int, how: str = "exit status 3", **more: Any) -> Outcome:
    return Outcome(rank, died=how, **more)


def run_error_text(*outcomes: Outcome) -> str:
    info = traces.info(world_size=2, ends=rank_ends(outcomes))
    return str(report.run_error("train", list(outcomes), Trace([], info)))


def test_cause_precedes_consequences() -> None:
    released = Outcome(0, error=Failure("Released", released=True))
    for message in (run_error_text(released, raised(1)), run_error_text(raised(1), released)):
        assert message.startswith("rank 1 raised ValueError: bad batch at ")
    after = run_error_text(raised(1), died(0))
    assert after.startswith("rank 1 raised ValueError: bad batch at ")
    assert "\nthe process of rank 0 exited (exit status 3)" in after


def test_earliest_exception_is_named_and_a_tie_names_the_lowest_rank() -> None:
    first, second = raised(1), raised(0)
    assert "\nTraceback on rank 0" in run_error_text(first, second)
    assert first.error is not None and second.error is not None
    second.error = replace(second.error, time=first.error.time + 2 * report.SIMULTANEOUS)
    assert "\nTraceback on rank 1" in run_error_text(second, first)


def test_death_precedes_errors_it_caused() -> None:
    broken = RuntimeError("Connection closed by peer [127.0.0.1]:1")
    wrapped = RuntimeError("the step failed")
    wrapped.__context__ = broken
    for error in (broken, wrapped):
        assert run_error_text(raised(1, error), died(0)).startswith("the process of rank 0 exited")
    assert run_error_text(died(0), raised(1)).startswith("the process of rank 0 exited")
