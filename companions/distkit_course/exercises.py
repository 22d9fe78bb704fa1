"""Exercises with hints and solutions; answers run on real ranks and are checked.

Example::

    def answer(x):                        # sums x over all ranks, in place
        ...

    dk.check.ring_all_reduce              # shows the task, like dk.check.ring_all_reduce()
    dk.check.ring_all_reduce(answer)      # checks results, messages and bytes
    dk.hint.ring_all_reduce()             # shows the next hint
    dk.solution.ring_all_reduce()         # shows a solution
    dk.solution.too_short()               # shows sample answers to a free-text question

``dk.check`` lists the exercises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from distkit.errors import wrapped
from distkit_course import content
from distkit_course.questions import LESSONS, QUESTIONS, Question
from distkit_course.task import Answer, PlainText, Source, Task, Verdict, source

__all__ = ["LESSONS", "QUESTIONS", "TASKS", "check", "hint", "solution"]

#: The checked exercises by name.
TASKS = {task.name: task for task in content.TASKS}


class _ExerciseMenu:
    """A namespace with one attribute per exercise; its repr lists them."""

    def __init__(
        self, heading: str, make: Callable[[Any], Callable[..., Any]], entries: Mapping[str, Any]
    ) -> None:
        self._heading, self._make, self._entries = heading, make, entries
        self.__doc__ = f"{__doc__}\n{self!r}"  # for help(dk.check)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if (entry := self._entries.get(name)) is None:
            names = ", ".join(self._entries)
            raise AttributeError(f"exercise {name!r} does not exist. Available: {names}.")
        return self._make(entry)

    def __dir__(self) -> Iterable[str]:
        return list(self._entries)

    def __repr__(self) -> str:
        width = max(map(len, self._entries))
        lines = (f"  {name:{width}}  {entry.title}" for name, entry in self._entries.items())
        return "\n".join([self._heading, *lines])


def _missing() -> None:
    """Stand in for a missing answer."""


class _Check:
    """Judges a function; without one, shows the task, like the repr."""

    def __init__(self, task: Task) -> None:
        self._task = task

    def __call__(self, answer: Answer = _missing) -> Verdict:
        return self._task.not_attempted if answer is _missing else self._task.judge(answer)

    def __repr__(self) -> str:
        return str(self._task)


_hints_given: dict[str, int] = {}  # index of the latest hint


def _hint(entry: Task | Question) -> PlainText:
    """Return the next hint, starting again after the last one."""
    index = _hints_given[entry.name] = (_hints_given.get(entry.name, -1) + 1) % len(entry.hints)
    end = (
        f"\nThat was the last hint. See dk.solution.{entry.name}()."
        if index + 1 == len(entry.hints)
        else ""
    )
    return PlainText(wrapped(f"Hint {index + 1} of {len(entry.hints)}: {entry.hints[index]}{end}"))


def _solution(entry: Task | Question) -> Source | PlainText:
    return source(entry.solution) if isinstance(entry, Task) else PlainText(wrapped(entry.answers))


_ALL: dict[str, Task | Question] = {**TASKS, **QUESTIONS}

check = _ExerciseMenu(
    "dk.check.NAME shows a task, dk.check.NAME(f) checks f on real ranks:", _Check, TASKS
)
hint = _ExerciseMenu(
    "dk.hint.NAME() shows the next hint:", lambda entry: partial(_hint, entry), _ALL
)
solution = _ExerciseMenu(
    "dk.solution.NAME() shows a solution, or sample answers to compare with yours:",
    lambda entry: partial(_solution, entry),
    _ALL,
)
