"""Exercises: check an answer on real ranks or with the real server, and get hints or a solution.

Example::

    def mine(x):                          # sums x over all ranks, in place
        ...

    dk.check.ring_all_reduce              # shows the task, like dk.check.ring_all_reduce()
    dk.check.ring_all_reduce(mine)        # checks results, messages and bytes
    dk.hint.ring_all_reduce()             # the next hint
    dk.solution.ring_all_reduce()         # a solution
    dk.solution.too_short()               # sample answers of a free-text question

``dk.check`` lists the exercises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from distkit_course import content
from distkit_course.questions import LESSONS, QUESTIONS, Question
from distkit_course.task import Answer, Source, Task, Verdict, Words, source

__all__ = ["LESSONS", "QUESTIONS", "TASKS", "check", "hint", "solution"]

#: Every exercise that is checked, by name.
TASKS = {task.name: task for task in content.TASKS}


class _Catalog:
    """A namespace with one attribute per exercise; its repr lists them."""

    def __init__(
        self, heading: str, make: Callable[[Any], Callable[..., Any]], known: Mapping[str, Any]
    ) -> None:
        self._heading, self._make, self._known = heading, make, known
        self.__doc__ = f"{__doc__}\n{self!r}"  # for help(dk.check)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if (entry := self._known.get(name)) is None:
            names = ", ".join(self._known)
            raise AttributeError(f"there is no exercise {name!r}. There are: {names}.")
        return self._make(entry)

    def __dir__(self) -> Iterable[str]:
        return list(self._known)

    def __repr__(self) -> str:
        width = max(map(len, self._known))
        lines = (f"  {name:{width}}  {entry.title}" for name, entry in self._known.items())
        return "\n".join([self._heading, *lines])


def _missing() -> None:
    """The default of a missing answer."""


class _Check:
    """Judges a function; without one, it shows the task, like its repr."""

    def __init__(self, task: Task) -> None:
        self._task = task

    def __call__(self, answer: Answer = _missing) -> Verdict:
        return self._task.not_attempted if answer is _missing else self._task.judge(answer)

    def __repr__(self) -> str:
        return str(self._task)


_hints_given: dict[str, int] = {}


def _hint(entry: Task | Question) -> Words:
    """Return the next hint; after the last, the first again."""
    index = _hints_given.get(entry.name, 0) % len(entry.hints)
    _hints_given[entry.name] = index + 1
    return Words(f"Hint {index + 1} of {len(entry.hints)}: {entry.hints[index]}")


def _solution(entry: Task | Question) -> Source | Words:
    return source(entry.solution) if isinstance(entry, Task) else Words(entry.answers)


_ALL: dict[str, Task | Question] = {**TASKS, **QUESTIONS}

check = _Catalog(
    "dk.check.NAME shows a task, dk.check.NAME(f) judges f on real ranks:", _Check, TASKS
)
hint = _Catalog("dk.hint.NAME() gives the next hint:", lambda entry: partial(_hint, entry), _ALL)
solution = _Catalog(
    "dk.solution.NAME() shows a solution, or answers to compare yours with:",
    lambda entry: partial(_solution, entry),
    _ALL,
)
