"""The exercises that need no ranks: solutions solve them, and each usual mistake has its words."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from answers import answer, check_is_no_attempt, empty, stub
from hypothesis import given
from hypothesis import strategies as st

import distkit as dk
from distkit.exercises import TASKS, placing, serving
from distkit.exercises.pages import Server
from distkit.exercises.serving import STEPS, trained

NAMES = [task.name for task in (*serving.TASKS, *placing.TASKS)]


@pytest.mark.parametrize("name", NAMES)
def test_the_solution_is_one(name: str) -> None:
    verdict = getattr(dk.check, name)(answer(name))
    assert verdict, repr(verdict)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("nothing", [empty, stub])
def test_a_stub_is_no_attempt(name: str, nothing: Any) -> None:
    check_is_no_attempt(name, nothing)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_no_answer(name: str) -> None:
    with pytest.raises(TypeError, match=f"dk.check.{name} judges a function, not int"):
        getattr(dk.check, name)(3)
    assert "yours takes ()" in repr(getattr(dk.check, name)(lambda: None))
    assert "ZeroDivisionError" in repr(getattr(dk.check, name)(lambda *args: 1 / 0))


@pytest.mark.parametrize("name", NAMES)
def test_every_hint_is_given(name: str) -> None:
    assert len({repr(getattr(dk.hint, name)()) for _ in TASKS[name].hints}) == len(
        TASKS[name].hints
    )


# -- the push handler ------------------------------------------------------------------


def handler(
    *,
    once: bool = True,
    whole: bool = True,
    clears: bool = True,
    forgets: bool = False,
    patient: bool = False,
    leaves: Callable[[list[int]], Any] = lambda waiting: [],
    drops: bool = False,
    by: Callable[[Server], None] = lambda s: s.update(sum(s.inbox.values())),
    early: bool = False,
    answers: Callable[[list[int]], Any] = list,
) -> Callable[..., Any]:
    """A push handler with a mistake or two."""

    def push(server: Server, worker: int, number: int, gradient: Any) -> Any:
        if once and (worker, number) in server.seen:
            return []
        server.seen.add((worker, number))
        server.inbox[worker] = gradient
        if whole and len(server.inbox) < (server.workers if server.sync or patient else 1):
            said = list(server.waiting) if early else []
            server.waiting = [] if drops else server.waiting
            return said
        by(server)
        if clears:
            server.inbox.clear()
        if forgets:
            server.seen.clear()
        said = answers(server.waiting)
        server.waiting = leaves(server.waiting)
        return said

    return push


def averages(server: Server) -> None:
    server.update(sum(server.inbox.values()) / len(server.inbox))


def one_by_one(server: Server) -> None:
    for gradient in server.inbox.values():
        server.update(gradient)


def by_hand(server: Server) -> None:
    server.value = server.value + sum(server.inbox.values())


def emptied(waiting: list[int]) -> list[int]:
    waiting.clear()
    return waiting


def scalar(server: Server) -> None:
    server.value = 0.5  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("mistake", "says"),
    [
        ({"once": False}, "applied 2 times: a push that comes again counts once"),
        ({"forgets": True}, "applied 2 times: a push that comes again counts once"),
        ({"by": averages}, "went in 0.50 times: it averages. A server sums up"),
        ({"whole": False}, "but the round is not complete: worker"),
        ({"early": True}, "it answers the pull of worker"),
        ({"clears": False}, "it was still in the inbox from the round before"),
        ({"by": one_by_one}, "2 updates where 1 would be right: a round is one update"),
        ({"by": by_hand}, "without server.update(total), which makes the step"),
        ({"by": scalar}, "server.value is 0.5: change it with server.update(total) alone"),
        ({"by": lambda server: None}, "the round is complete, but the value has no push"),
        ({"answers": lambda waiting: None}, "it returns None: return the list of workers"),
        ({"answers": lambda waiting: [], "leaves": list}, "wait for ever. Return everybody in"),
        ({"answers": lambda waiting: [*waiting, 7]}, "it answers worker 7, whose pull does not"),
        ({"answers": emptied}, "empty when it was returned. Keep the list before you empty it"),
        (
            {"leaves": list},
            "it would be answered again in the next round. Remove the workers that you",
        ),
        ({"leaves": tuple}, "server.waiting is (1,): leave a list of workers there"),
        ({"drops": True}, "but its pull has no answer: it would wait for ever. Empty the list"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_a_mistake_in_the_push_handler_is_named(mistake: dict[str, Any], says: str) -> None:
    assert dk.check.push_handler(handler())
    verdict = dk.check.push_handler(handler(**mistake))
    assert verdict.status == "not right yet"
    assert says in verdict.points[-1].text and not verdict.points[-1].good


def test_who_waits_for_all_under_dist_async_has_dist_sync_right() -> None:
    verdict = dk.check.push_handler(handler(patient=True))
    assert [p.good for p in verdict.points] == [True, False]
    assert "dist_async applies each gradient at once" in verdict.points[1].text


def test_the_messages_before_the_mistake_are_told() -> None:
    (point,) = dk.check.push_handler(handler(by=averages)).points
    first, *story, _ = point.text.splitlines()
    assert first == "dist_sync with 2 workers:"
    assert any("pulls, and waits" in line for line in story) and "push 0 of worker" in story[0]


# -- whom a pull waits for, and which bound ----------------------------------------------


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        (
            lambda w, clocks, b: {o for o in clocks if clocks[o] <= clocks[w] - b - (o == w)},
            "is 2 behind, exactly 2: that is allowed",
        ),
        (
            lambda w, clocks, b: {o for o in clocks if abs(clocks[o] - clocks[w]) > b},
            "is ahead: a pull waits only for workers behind it",
        ),
        (lambda w, clocks, b: set(), "is 3 behind, more than 2"),
        (
            lambda w, clocks, b: {o for o in clocks if clocks[o] < clocks[w]},
            "is 1 behind, less than 2: that is allowed",
        ),
        (lambda w, clocks, b: clocks[w] - min(clocks.values()) > b, "Return a set of workers"),
        (lambda w, clocks, b: {"all"}, "There is no worker 'all'"),
    ],
)
def test_a_wrong_rule_is_shown_where_it_is_wrong(rule: Any, says: str) -> None:
    verdict = dk.check.waits_for(rule)
    assert verdict.status == "not right yet" and says in verdict.points[0].text


@pytest.mark.parametrize(
    ("bound", "says"),
    [
        (lambda step, pause: pause / step, "it returns 4.5: a bound is a whole number"),
        (lambda step, pause: int(pause / step), "with your bound of 4 the others wait 5 ms"),
        (lambda step, pause: math.ceil(pause / step) + 1, "more than 5 ahead: 5 would do"),
        (lambda step, pause: 5, "steps of 10 ms, a pause of 0 ms: with your bound of 5 nobody"),
    ],
)
def test_a_wrong_bound_is_told_what_it_costs(bound: Any, says: str) -> None:
    verdict = dk.check.staleness_bound(bound)
    assert verdict.status == "not right yet" and says in verdict.points[-1].text


@given(st.integers(1, 50), st.integers(0, 400))
def test_the_bound_is_the_smallest_with_which_nobody_waits(step: int, pause: int) -> None:
    bound = answer("staleness_bound")(step, pause)
    waited, ahead = trained(bound, step, pause)
    assert waited == 0 and ahead == min(bound, ahead)
    if 0 < bound < STEPS - 10:
        assert trained(bound - 1, step, pause)[0] > 0
        assert ahead == bound


# -- what goes between machines ------------------------------------------------------------


@pytest.mark.parametrize(
    ("mistaken", "says"),
    [
        (lambda here, n: answer("bytes_between")(here, n) / 2, "the ring goes round twice"),
        (
            lambda here, n: sum(map(str.__ne__, here, here[1:])) * 2 * (len(here) - 1) * 1000,
            "the last rank sends to the first",
        ),
        (lambda here, n: 2 * (len(here) - 1) * n, "whose right neighbour is elsewhere"),
        (lambda here, n: "all", "it returns 'all' where 0 is right"),
    ],
)
def test_wrong_bytes_are_told_with_a_usual_reason(mistaken: Any, says: str) -> None:
    verdict = dk.check.bytes_between(mistaken)
    assert verdict.status == "not right yet" and says in verdict.points[0].text
