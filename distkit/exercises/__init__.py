"""Your turn: write it yourself, and have it judged: on real ranks, or beside the real server.

Example::

    def mine(x):                          # is to sum x over all ranks, in place
        ...

    dk.check.ring_all_reduce              # the task
    dk.check.ring_all_reduce(mine)        # right? as few messages and bytes as can be?
    dk.hint.ring_all_reduce()             # the next hint
    dk.solution.ring_all_reduce()         # the library's own page

``dk.check`` lists the exercises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from distkit.exercises import collectives, placing, serving, training
from distkit.exercises.task import Source, Task, Verdict, Words, source

__all__ = ["check", "hint", "solution"]

#: Every exercise by name.
TASKS = {
    task.name: task
    for task in (*collectives.TASKS, *training.TASKS, *serving.TASKS, *placing.TASKS)
}


class _Desk:
    """One attribute per exercise; its repr tells what they are."""

    def __init__(self, what: str, make: Callable[[Task], Callable[..., Any]]) -> None:
        self._what, self._make = what, make
        self.__doc__ = f"{__doc__}\n{self!r}"  # for help(dk.check)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in TASKS:
            raise AttributeError(f"there is no exercise {name!r}. There are: {', '.join(TASKS)}.")
        return self._make(TASKS[name])

    def __dir__(self) -> Iterable[str]:
        return list(TASKS)

    def __repr__(self) -> str:
        width = max(map(len, TASKS))
        lines = (f"  {name:{width}}  {task.title}" for name, task in TASKS.items())
        return "\n".join([self._what, *lines])


class _Check:
    """Judges a function; its repr is the task."""

    def __init__(self, task: Task) -> None:
        self._task = task

    def __call__(self, mine: Callable[..., Any]) -> Verdict:
        return self._task.judge(mine)

    def __repr__(self) -> str:
        return str(self._task)


_given: dict[str, int] = {}


def _hint(task: Task) -> Words:
    """The next hint; after the last one it begins again."""
    nth = _given.get(task.name, 0) % len(task.hints)
    _given[task.name] = nth + 1
    return Words(f"Hint {nth + 1} of {len(task.hints)}: {task.hints[nth]}")


def _solution(task: Task) -> Source:
    return source(task.page)


check = _Desk("dk.check.NAME(f) judges f on real ranks:", _Check)
hint = _Desk("dk.hint.NAME() gives the next hint:", lambda task: partial(_hint, task))
solution = _Desk(
    "dk.solution.NAME() shows the library's page:", lambda task: partial(_solution, task)
)
