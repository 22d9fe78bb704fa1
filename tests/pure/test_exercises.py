"""The exercises that need no ranks, judged in this process: each mistake has its words."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from answers import answer, here
from hypothesis import given
from hypothesis import strategies as st

from distkit.algorithms.catalogue import PIPELINES
from distkit.algorithms.schedules import ring
from distkit.exercises.models import broadcast_seconds, chunk_sent, crossover, order_1f1b
from distkit.exercises.pages import Server
from distkit.exercises.serving import STEPS, trained
from distkit.exercises.task import Criterion, Verdict
from distkit.exercises.trials import judged
from distkit_simulation import cost
from distkit_simulation.network import Link, Network
from distkit_simulation.simulator import finish_times

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
    assert here("push_handler")(handler())
    verdict = here("push_handler")(handler(**mistake))
    assert verdict.status == "fail"
    assert says in verdict.criteria[-1].text and verdict.criteria[-1].status == "fail"


def test_who_waits_for_all_under_dist_async_has_dist_sync_right() -> None:
    verdict = here("push_handler")(handler(patient=True))
    assert [c.status for c in verdict.criteria] == ["pass", "fail"] and verdict.points == 1
    assert "dist_async applies each gradient at once" in verdict.criteria[1].text


def test_the_messages_before_the_mistake_are_told() -> None:
    (point,) = here("push_handler")(handler(by=averages)).criteria
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
    verdict = here("waits_for")(rule)
    assert verdict.status == "fail" and says in verdict.criteria[0].text


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
    verdict = here("staleness_bound")(bound)
    assert verdict.status == "fail" and says in verdict.criteria[-1].text


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
    verdict = here("bytes_between")(mistaken)
    told = verdict.criteria[0].text
    assert verdict.status == "fail" and says in told and ", or " not in told


# -- models --------------------------------------------------------------------------------


@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 3), (2, 2), (4, 2), (4, 9)])
def test_the_order_of_1f1b_is_that_of_the_catalogue(ranks: int, microbatches: int) -> None:
    orders = PIPELINES["1f1b"].orders(ranks, microbatches)
    ours = [order_1f1b(rank, ranks, microbatches) for rank in range(ranks)]
    assert ours == [[(a.kind, a.microbatch) for a in order] for order in orders]


@given(st.integers(1, 40), st.sampled_from([Link(1e-6, 1e-9), Link(5e-6, 8e-11)]))
def test_the_time_of_a_broadcast_is_the_simulators(n: int, link: Link) -> None:
    simulated = finish_times("broadcast", n, 4000, Network(link)).max()
    assert math.isclose(broadcast_seconds(n, 4000, link), simulated, abs_tol=1e-12)


@pytest.mark.parametrize("n", [6, 8, 16])
def test_the_crossover_is_that_of_the_cost_formulas(n: int) -> None:
    at = crossover(n, 1e-6, 1e-9)
    found = cost.crossovers(n, Link(1e-6, 1e-9), among=["tree", "ring"])
    assert [name for _, name in found] == ["tree", "ring"]
    assert math.isclose(found[1][0], at, rel_tol=1e-3)


@given(st.integers(2, 7))
def test_the_chunks_of_the_ring_are_those_of_the_schedule(n: int) -> None:
    for step, one in enumerate(ring(n)):
        assert one.chunk.tolist() == [chunk_sent(int(rank), step, n) for rank in one.src]


# -- time ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ratio", "busy", "status"),
    [(2.0, False, "pass"), (2.0, True, "pass"), (1.0, False, "wasteful"), (1.0, True, "blocked")],
)
def test_a_busy_machine_blocks_what_it_cannot_tell(ratio: float, busy: bool, status: str) -> None:
    noisy = [(1.0, ratio), (1.0, ratio), (9.0, ratio), (1.0, 9.0), (1.0, ratio)]
    assert judged(noisy, 1.5, busy).status == status


def test_what_is_blocked_is_worth_nothing_and_costs_nothing() -> None:
    met, blocked = Criterion("values", "right"), Criterion("time", "too busy", "blocked")
    verdict = Verdict("overlap", "blocked", (met, blocked), worth=2)
    assert (verdict.points, verdict.max, verdict.credit) == (1, 1, 2.0) and not verdict
    assert "– too busy" in repr(verdict) and "blocked" in verdict._repr_html_()
