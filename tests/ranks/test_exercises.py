"""Exercises: their solutions pass, stubs are not attempts, mistakes are named."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import nbformat
import pytest
import torch
import torch.distributed as dist
from answers import answer, empty, stub
from torch import Tensor

import distkit as dk
from distkit_course.content.collectives import to_all_ranks
from distkit_course.content.parameter_server import Server
from distkit_course.content.programs import stop_together
from distkit_course.exercises import LESSONS, QUESTIONS, TASKS
from tests.stress.course.mistakes import is_timed, tolerated

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"


@pytest.mark.parametrize("name", TASKS)
def test_solution_passes_and_stub_is_not_attempted(name: str) -> None:
    task, check = TASKS[name], getattr(dk.check, name)
    verdict = check(answer(name))
    assert verdict.points == verdict.max, repr(verdict)
    assert verdict.status == "pass" or (is_timed(task) and verdict.status == "blocked")
    assert verdict.worth == task.worth and repr(verdict).startswith(f"{name}: ")
    for unattempted in (empty, stub):
        verdict = check(unattempted)
        assert not verdict and verdict.status == "not attempted" and verdict.points == 0
        assert task.signature in repr(verdict)


@pytest.mark.parametrize("name", TASKS)
def test_common_mistake_is_rejected_with_its_message(name: str) -> None:
    """`make stress` tries all mistakes."""
    assert len(TASKS[name].wrong) >= 3
    assert tolerated(TASKS[name], 1) == []


def all_reduce_through_host(x: Tensor, host: Callable[[Tensor], Tensor]) -> None:
    """All-reduce through host memory, as for a tensor on a GPU."""
    dist.all_reduce(copy := host(x))
    x.copy_(copy)


@pytest.mark.parametrize(
    "host", [lambda x: x.cpu(), lambda x: x.detach().cpu(), lambda x: x.data.to("cpu")]
)
def test_staged_all_reduce_passes_without_a_gpu(host: Callable[[Tensor], Tensor]) -> None:
    assert dk.check.staged(lambda x: all_reduce_through_host(x, host)).status == "pass"


@pytest.mark.parametrize("name", TASKS)
def test_invalid_answer_is_rejected(name: str) -> None:
    with pytest.raises(TypeError, match=f"dk.check.{name} expects a function, not int"):
        getattr(dk.check, name)(3)
    assert "yours takes no arguments" in repr(getattr(dk.check, name)(lambda: None))
    assert str(TASKS[name]) in repr(getattr(dk.check, name)())


@pytest.mark.parametrize("name", [*TASKS, *QUESTIONS])
def test_every_hint_is_shown(name: str) -> None:
    hints = {**TASKS, **QUESTIONS}[name].hints
    shown = [repr(getattr(dk.hint, name)()) for _ in range(2 * len(hints))]
    assert shown[: len(hints)] == shown[len(hints) :]
    end = f"\nThat was the last hint. See dk.solution.{name}()."
    assert sorted(shown[: len(hints)]) == [
        dk.errors.wrapped(f"Hint {i} of {len(hints)}: {hint}{end if i == len(hints) else ''}")
        for i, hint in enumerate(hints, 1)
    ]


def flat(x: torch.Tensor) -> None:
    to_all_ranks(x)


def test_correct_result_with_too_many_bytes_loses_points() -> None:
    verdict = dk.check.ring_all_reduce(flat)
    assert verdict.status == "wasteful"
    text = repr(verdict)
    assert "✗ 12,288 bytes sent by the busiest rank; Ring needs 6,144" in text
    assert "✓ 3 messages" in text and "dk.hint.ring_all_reduce()" in text
    assert "wasteful" in verdict._repr_html_()


def off_by_one(x: torch.Tensor) -> None:
    flat(x)
    x += 1.0


def test_wrong_result_is_shown() -> None:
    verdict = dk.check.ring_all_reduce(off_by_one)
    assert verdict.status == "fail"
    assert "on 2 ranks, with 1 element, rank 0 ends with\n    [31]" in repr(verdict)
    assert "expected [30]" in repr(verdict)


def stuck(x: torch.Tensor) -> None:
    if dist.get_world_size() > 1:
        dist.recv(x, (dist.get_rank() + 1) % dist.get_world_size())


def test_hang_is_explained() -> None:
    verdict = dk.check.ring_all_reduce(stuck)
    assert verdict.status == "fail" and "waits in recv" in repr(verdict)
    assert "on 2 ranks:\n    deadlock in stuck: " in repr(verdict)
    assert "released" not in repr(verdict) and "trial" not in repr(verdict)


def outer(x: torch.Tensor) -> None:
    inner(x)


def inner(x: torch.Tensor) -> None:
    if dist.get_world_size() == 3:
        dist.send(x, 3)
    flat(x)


def test_error_shows_the_answers_lines_and_the_number_of_ranks() -> None:
    text = repr(dk.check.ring_all_reduce(outer))
    message = r"✗ on 3 ranks:\n    ranks 0, 1 and 2 raised ValueError: send: rank 3 does"
    assert re.search(message, text)
    assert "in outer" in text and "in inner" in text
    assert not any(
        word in text for word in ("exercises/collectives", "collectives.py", "-packages/", "trial")
    )


def test_messages_omit_course_files_and_error_codes() -> None:
    changes, fails, inverts = [
        repr(dk.check.stop_together(answer))
        for answer in (
            lambda loss, limit: dist.all_reduce(loss),
            lambda loss, limit: loss.no_such_name,
            lambda loss, limit: not stop_together(loss, limit),
        )
    ]
    assert (
        "✗ on 2 ranks:\n    the arguments must not change: work on a copy, made with clone"
        in changes
    )
    assert "ranks 0 and 1 raised AttributeError: 'Tensor' object has no attribute" in fails
    assert not any(word in changes + fails for word in ("judges.py", "[DK", "WrongAnswer"))
    assert "with losses [1.0, 1.0] and limit 2.0, it returns False" in inverts


def returns_the_result(x: torch.Tensor) -> torch.Tensor:
    total = x.clone()
    flat(total)
    return total


def test_result_that_is_returned_instead_of_written_in_place_is_named() -> None:
    verdict = dk.check.ring_all_reduce(returns_the_result)
    message = "it returns the correct result, but the result must be in x: write it into x"
    assert verdict.status == "fail" and message in repr(verdict)


def test_catalogs_list_the_exercises() -> None:
    assert all(name in repr(dk.check) for name in TASKS)
    assert "def ring_all_reduce(x)" in repr(dk.check.ring_all_reduce)
    assert dir(dk.check) == sorted(TASKS) and dir(dk.solution) == sorted([*TASKS, *QUESTIONS])
    with pytest.raises(AttributeError, match=r"exercise 'ring' does not exist. Available: relay"):
        _ = dk.check.ring
    assert dk.solution.broadcast()._repr_markdown_().startswith("```python\nfrom torch")


def test_every_exercise_is_named_in_its_lesson() -> None:
    assert sorted(chain(*LESSONS.values())) == sorted([*TASKS, *QUESTIONS])
    assert len(TASKS) >= 25
    for lesson, names in LESSONS.items():
        cells = nbformat.read(NOTEBOOKS / f"{lesson}.ipynb", as_version=4).cells
        named = set(re.findall(r"dk\.(?:check|hint)\.(\w+)", "\n".join(c.source for c in cells)))
        assert set(names) <= named - {"NAME"} <= set(names) | {"NAME"}, lesson


@pytest.mark.parametrize("lesson", LESSONS)
def test_each_exercise_at_the_end_of_a_lesson_has_a_hint(lesson: str) -> None:
    cells = nbformat.read(NOTEBOOKS / f"{lesson}.ipynb", as_version=4).cells
    text = "\n".join(cell.source for cell in cells)
    part = re.split(r"xercises?\n", text)[-1].partition("\n## ")[0]
    items = re.findall(r"^\d+\. .*", part, flags=re.M)
    assert all(re.search(r"dk\.(check|hint)\.(\w+)", item) for item in items)
    assert items or lesson == "00_welcome"


@pytest.mark.parametrize("name", QUESTIONS)
def test_question_has_answers_at_three_levels(name: str) -> None:
    answers, shown = QUESTIONS[name].answers, repr(getattr(dk.solution, name)())
    assert shown == dk.errors.wrapped(answers) and re.search(
        r"^excellent: .{20,}\n\ngood: .{20,}\n\nacceptable: .{3,}$", answers
    )


# -- the push handler ------------------------------------------------------------------


def handler(
    *,
    ignores_repeats: bool = True,
    waits_for_round: bool = True,
    clears_inbox: bool = True,
    forgets_requests: bool = False,
    waits_under_async: bool = False,
    leaves: Callable[[list[int]], Any] = lambda waiting: [],
    drops_pulls: bool = False,
    apply_round: Callable[[Server], None] = lambda s: s.update(sum(s.inbox.values())),
    answers_early: bool = False,
    answers: Callable[[list[int]], Any] = list,
) -> Callable[..., Any]:
    """Return a push handler, which is correct by default."""

    def push(server: Server, worker: int, number: int, gradient: Any) -> Any:
        if ignores_repeats and (worker, number) in server.seen:
            return []
        server.seen.add((worker, number))
        server.inbox[worker] = gradient
        if waits_for_round and len(server.inbox) < (
            server.workers if server.sync or waits_under_async else 1
        ):
            answered = list(server.waiting) if answers_early else []
            server.waiting = [] if drops_pulls else server.waiting
            return answered
        apply_round(server)
        if clears_inbox:
            server.inbox.clear()
        if forgets_requests:
            server.seen.clear()
        answered = answers(server.waiting)
        server.waiting = leaves(server.waiting)
        return answered

    return push


def update_for_each(server: Server) -> None:
    for gradient in server.inbox.values():
        server.update(gradient)


def update_directly(server: Server) -> None:
    server.value = server.value + sum(server.inbox.values())


def empty_in_place(waiting: list[int]) -> list[int]:
    waiting.clear()
    return waiting


def assign_number(server: Server) -> None:
    server.value = 0.5  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("mistake", "text"),
    [
        ({"ignores_repeats": False}, "applied 2 times: a repeated push counts once"),
        ({"forgets_requests": True}, "applied 2 times: a repeated push counts once"),
        (
            {"apply_round": lambda s: s.update(sum(s.inbox.values()) / len(s.inbox))},
            "was applied 0.50 times: it averages. A server sums",
        ),
        ({"waits_for_round": False}, "but the round is not complete: worker"),
        ({"answers_early": True}, "it answers the pull of worker"),
        ({"clears_inbox": False}, "it was still in the inbox from the round before"),
        ({"apply_round": update_for_each}, "2 updates; expected 1: a round is one update"),
        (
            {"apply_round": update_directly},
            "the value is correct, but was changed without server.update(total)",
        ),
        (
            {"apply_round": assign_number},
            "server.value is 0.5: change it only with server.update(total)",
        ),
        (
            {"apply_round": lambda server: None},
            "the round is complete, but the value does not contain push",
        ),
        ({"answers": lambda waiting: None}, "it returns None: return the list of workers"),
        ({"answers": lambda waiting: [], "leaves": list}, "wait forever. Return all workers in"),
        (
            {"answers": lambda waiting: [*waiting, 7]},
            "it answers worker 7, which has no waiting pull",
        ),
        (
            {"answers": empty_in_place},
            "empty when it was returned. Save the list before you empty it",
        ),
        (
            {"leaves": list},
            "it would be answered again in the next round. Remove the workers that you",
        ),
        ({"leaves": tuple}, "server.waiting is (1,): it must stay a list of workers"),
        (
            {"drops_pulls": True},
            "but its pull has no answer: it would wait forever. Empty the list",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_mistake_in_the_push_handler_is_named(mistake: dict[str, Any], text: str) -> None:
    verdict = dk.check.push_handler(handler(**mistake))
    assert verdict.status == "fail"
    assert text in verdict.criteria[-1].text and verdict.criteria[-1].status == "fail"


def test_waiting_for_all_under_dist_async_fails_only_that_criterion() -> None:
    verdict = dk.check.push_handler(handler(waits_under_async=True))
    assert [c.status for c in verdict.criteria] == ["pass", "fail"] and verdict.points == 1
    assert "dist_async applies each gradient immediately" in verdict.criteria[1].text


# -- staleness rules and bounds ----------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "text"),
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
def test_wrong_rule_is_shown_at_its_first_violation(rule: Any, text: str) -> None:
    verdict = dk.check.waits_for(rule)
    assert verdict.status == "fail" and text in verdict.criteria[0].text


@pytest.mark.parametrize(
    ("bound", "text"),
    [
        (lambda step, pause: pause / step, "it returns 4.5: a bound is a whole number"),
        (lambda step, pause: int(pause / step), "with your bound of 4 the others wait 5 ms"),
        (lambda step, pause: math.ceil(pause / step) + 1, "more than 5 ahead: 5 suffices"),
        (lambda step, pause: 5, "steps of 10 ms, a pause of 0 µs: with your bound of 5 no worker"),
    ],
)
def test_wrong_bound_is_reported_with_its_cost(bound: Any, text: str) -> None:
    verdict = dk.check.staleness_bound(bound)
    assert verdict.status == "fail" and text in verdict.criteria[-1].text


# -- traffic between machines --------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (
            lambda here, n: answer("bytes_between")(here, n) / 2,
            "travels around the ring twice",
        ),
        (
            lambda here, n: sum(map(str.__ne__, here, here[1:])) * 2 * (len(here) - 1) * 1000,
            "the last rank sends to the first",
        ),
        (lambda here, n: 2 * (len(here) - 1) * n, "whose right neighbor is on another machine"),
        (lambda here, n: "all", "it returns 'all'; expected 12000"),
    ],
)
def test_wrong_byte_count_is_reported_with_a_common_reason(wrong: Any, text: str) -> None:
    verdict = dk.check.bytes_between(wrong)
    assert verdict.status == "fail" and text in verdict.criteria[0].text
