"""Your turn: write it yourself, and have it judged: on real ranks, or beside the real server.

Example::

    def mine(x):                          # is to sum x over all ranks, in place
        ...

    dk.check.ring_all_reduce              # the task; dk.check.ring_all_reduce() shows it, too
    dk.check.ring_all_reduce(mine)        # right? as few messages and bytes as can be?
    dk.hint.ring_all_reduce()             # the next hint
    dk.solution.ring_all_reduce()         # a solution
    dk.solution.too_short()               # of a question in words: three answers to compare with

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


class _Desk:
    """One attribute per exercise; its repr tells what they are."""

    def __init__(
        self, what: str, make: Callable[[Any], Callable[..., Any]], known: Mapping[str, Any]
    ) -> None:
        self._what, self._make, self._known = what, make, known
        self.__doc__ = f"{__doc__}\n{self!r}"  # for help(dk.check)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if (one := self._known.get(name)) is None:
            there = ", ".join(self._known)
            raise AttributeError(f"there is no exercise {name!r}. There are: {there}.")
        return self._make(one)

    def __dir__(self) -> Iterable[str]:
        return list(self._known)

    def __repr__(self) -> str:
        width = max(map(len, self._known))
        lines = (f"  {name:{width}}  {one.title}" for name, one in self._known.items())
        return "\n".join([self._what, *lines])


def _none() -> None:
    """Stands for the answer that was not given."""


class _Check:
    """Judges a function; its repr, and a call without a function, show the task."""

    def __init__(self, task: Task) -> None:
        self._task = task

    def __call__(self, mine: Answer = _none) -> Verdict:
        return self._task.not_attempted if mine is _none else self._task.judge(mine)

    def __repr__(self) -> str:
        return str(self._task)


_given: dict[str, int] = {}


def _hint(one: Task | Question) -> Words:
    """The next hint; after the last one it begins again."""
    nth = _given.get(one.name, 0) % len(one.hints)
    _given[one.name] = nth + 1
    return Words(f"Hint {nth + 1} of {len(one.hints)}: {one.hints[nth]}")


def _solution(one: Task | Question) -> Source | Words:
    return source(one.solution) if isinstance(one, Task) else Words(one.answers)


_ALL: dict[str, Task | Question] = {**TASKS, **QUESTIONS}

check = _Desk("dk.check.NAME shows a task, dk.check.NAME(f) judges f on real ranks:", _Check, TASKS)
hint = _Desk("dk.hint.NAME() gives the next hint:", lambda one: partial(_hint, one), _ALL)
solution = _Desk(
    "dk.solution.NAME() shows a solution, or answers to compare yours with:",
    lambda one: partial(_solution, one),
    _ALL,
)
