"""The exercises' own answers: wrong ones are rejected for what is wrong, right ones accepted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.course.lessons import none
from benchmarks.figure import Figure
from distkit_course.exercises import TASKS
from distkit_course.task import Task


def measure(reps: int, say: Callable[[str], None]) -> tuple[list[Figure], dict[str, Any]]:
    """Every answer once; the same every time, so ``reps`` do not matter."""
    missed, refused = controls(say)
    wrong = sum(len(task.wrong) for task in TASKS.values())
    return [
        none(f"wrong answers, of {wrong}, not rejected as intended", missed),
        none(f"right answers, of {len(TASKS)}, not accepted", refused),
    ], {}


def controls(say: Callable[[str], None]) -> tuple[int, int]:
    """How many wrong answers are not rejected as they should, and right ones not accepted."""
    failed, refused = 0, 0
    for task in TASKS.values():
        say(f"course: {task.name}")
        refused += task.judge(task.solution).status not in ("pass", "blocked")
        failed += sum(not rejected(task, answer, said) for answer, said in task.wrong)
    return failed, refused


def rejected(task: Task, answer: Callable[..., Any], said: str) -> bool:
    """True if an answer is rejected by this message, or time cannot be measured now."""
    verdict = task.judge(answer)
    text = " ".join(c.text for c in verdict.criteria if c.status != "pass")
    return not verdict and (said in text or verdict.status == "blocked")
