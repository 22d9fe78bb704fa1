"""Common mistakes in an exercise, which its judge must reject."""

from __future__ import annotations

from distkit_course.judges import AllOf
from distkit_course.task import Task


def is_timed(task: Task) -> bool:
    return isinstance(task.trial, AllOf)


def tolerated(task: Task, most: int | None = None) -> list[str]:
    """The verdicts on the first ``most`` mistakes that do not reject with the message."""
    found = []
    for mistaken, message in task.wrong[:most]:
        verdict = task.judge(mistaken)
        text = " ".join(c.text for c in verdict.criteria if c.status != "pass")
        busy = is_timed(task) and verdict.status == "blocked" and "too busy" in text
        named = (message in text and "NameError" not in text) or busy
        if verdict or verdict.points >= verdict.worth or not named:
            found.append(repr(verdict))
    return found
