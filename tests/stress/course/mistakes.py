"""Common mistakes in the exercises, which the judges must reject."""

from __future__ import annotations

from distkit_course.judges import FasterThan
from distkit_course.task import Task


def is_timed(task: Task) -> bool:
    return isinstance(getattr(task.trial, "then", None), FasterThan)


def tolerated(task: Task, most: int | None = None) -> list[str]:
    """Return the wrong verdicts on the first ``most`` mistakes, or on all if None."""
    found = []
    for mistake, message in task.wrong[:most]:
        verdict = task.judge(mistake)
        text = " ".join(c.text for c in verdict.criteria if c.status != "pass")
        busy = is_timed(task) and verdict.status == "blocked" and "too busy" in text
        named = (message in text and "NameError" not in text) or busy
        if verdict or verdict.points >= verdict.worth or not named:
            found.append(repr(verdict))
    return found
