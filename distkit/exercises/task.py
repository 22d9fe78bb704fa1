"""What every exercise has: a name, something to write, hints, a solution and a judge."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from typing import Any

from distkit.exercises.verdict import Point, Verdict

Answer = Callable[..., Any]


@dataclass(frozen=True)
class Task(ABC):
    """One exercise.

    Args:
        name: as in ``dk.check.NAME``.
        signature: the line to begin with.
        goal: what the function has to do.
        page: the library's own answer.
        hints: the first says least.
    """

    name: str
    signature: str
    goal: str
    page: Answer
    hints: tuple[str, ...]

    @property
    def title(self) -> str:
        """A few words for a list."""
        return f"{self.signature}: {self.goal}"

    @property
    def parameters(self) -> list[str]:
        """The names of what the function takes."""
        return self.signature.partition("(")[2].rstrip(")").split(", ")

    def judge(self, mine: Answer) -> Verdict:
        """How good an answer is.

        Raises:
            TypeError: it is no function.
        """
        if not callable(mine):
            raise TypeError(
                f"dk.check.{self.name} judges a function, not {type(mine).__name__}. "
                f"Write def {self.signature} and pass it without calling it."
            )
        if not _takes(mine, len(self.parameters)):
            return self.not_yet(f"write def {self.signature}: yours takes {signature(mine)}")
        return self.trial(mine)

    @abstractmethod
    def trial(self, mine: Answer) -> Verdict:
        """Try a function that takes what it should."""

    def not_attempted(self) -> Verdict:
        """It is a stub."""
        return Verdict(self.name, "not attempted", (), f"{self}\nStuck? dk.hint.{self.name}()")

    def not_yet(self, why: str, good: tuple[str, ...] = ()) -> Verdict:
        """It is wrong, and why; before that, what of it was right."""
        points = (*(Point(True, text) for text in good), Point(False, why))
        return Verdict(self.name, "not right yet", points, self.help)

    def solved(self, *good: str) -> Verdict:
        """It is right, in these points."""
        return Verdict(self.name, "solved", tuple(Point(True, text) for text in good))

    @property
    def help(self) -> str:
        """Where to look next."""
        return f"dk.hint.{self.name}() helps; dk.solution.{self.name}() shows the library's page."


def name_of(mine: Answer) -> str:
    """What to call an answer."""
    return getattr(mine, "__name__", type(mine).__name__)


def _takes(mine: Answer, count: int) -> bool:
    """Whether a function can be called with so many arguments."""
    try:
        signature(mine).bind(*range(count))
    except TypeError:
        return False
    except ValueError:  # compiled: it does not say what it takes
        return True
    return True
