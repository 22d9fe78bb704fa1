"""The usual mistakes in an exercise, as its judge must reject them."""

from __future__ import annotations

from distkit_course.judges import Both
from distkit_course.task import Task


def is_timed(task: Task) -> bool:
    return isinstance(task.trial, Both)


def tolerated(task: Task, most: int | None = None) -> list[str]:
    """The verdicts that do not reject a mistake by its message, of the first ``most``."""
    found = []
    for mistaken, message in task.wrong[:most]:
        verdict = task.judge(mistaken)
        said = " ".join(c.text for c in verdict.criteria if c.status != "pass")
        busy = is_timed(task) and verdict.status == "blocked" and "too busy" in said
        named = (message in said and "NameError" not in said) or busy
        if verdict or verdict.points >= verdict.worth or not named:
            found.append(repr(verdict))
    return found
