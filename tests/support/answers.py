"""What is handed to the exercises' judge: solutions, and attempts that are none."""

from __future__ import annotations

from typing import Any

import distkit as dk
from distkit.exercises import TASKS


def answer(name: str) -> Any:
    """The solution's text, run as in a notebook's cell."""
    space: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(getattr(dk.solution, name)(), "answer", "exec"), space)
    return space[TASKS[name].page.__name__]


def empty(*args: object) -> None: ...


def stub(*args: object) -> None:
    raise NotImplementedError


def check_is_no_attempt(name: str, nothing: Any) -> None:
    """It is told what to write, and is not judged."""
    verdict = getattr(dk.check, name)(nothing)
    assert not verdict and verdict.status == "not attempted"
    assert TASKS[name].signature in repr(verdict)
