"""The parts of an exercise: a name, a stub, hints, a solution, and its judge."""

from __future__ import annotations

import ast
import inspect
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from html import escape
from types import ModuleType
from typing import Any

Answer = Callable[..., Any]


class NotAttempted(Exception):
    """The answer is a stub."""


class Mistake(Exception):
    """The mistakes in an answer, in words."""


@dataclass(frozen=True)
class Point:
    """One thing that was looked at, and whether it is as it should be."""

    good: bool
    text: str


@dataclass(frozen=True)
class Verdict:
    """The verdict on an answer; true when the exercise is solved.

    ``status`` is "solved", "right, but not the best", "not right yet" or "not attempted".
    """

    name: str
    status: str
    points: tuple[Point, ...] = ()
    advice: str = ""

    def __bool__(self) -> bool:
        return self.status == "solved"

    def __repr__(self) -> str:
        lines = [f"{self.name}: {self.status}"]
        lines += [f"  {'✓' if p.good else '✗'} {_indented(p.text)}" for p in self.points]
        return "\n".join([*lines, *([f"  {self.advice}"] if self.advice else [])])

    def _repr_html_(self) -> str:
        """The same for a notebook."""
        colour = {"solved": "#009e73", "not attempted": "#7f8c99"}.get(self.status, "#d55e00")
        rows = "".join(
            f'<tr><td style="color:{"#009e73" if p.good else "#d55e00"};vertical-align:top">'
            f'{"✓" if p.good else "✗"}</td><td style="text-align:left;white-space:pre-wrap">'
            f"{escape(p.text)}</td></tr>"
            for p in self.points
        )
        advice = self.advice and f'<div style="white-space:pre-wrap">{escape(self.advice)}</div>'
        return (
            f'<div style="border-left:4px solid {colour};padding:4px 12px"><strong>'
            f"{escape(self.name)}: {self.status}</strong><table>{rows}</table>{advice}</div>"
        )


#: Tries an answer: yields what is right, or right but not the best. Raises NotAttempted or Mistake.
Trial = Callable[[Answer], Iterator[Point]]


@dataclass(frozen=True)
class Task:
    """One exercise.

    Args:
        name: as in ``dk.check.NAME``.
        signature: the line to begin with.
        goal: what the function has to do.
        told: what its writer has to know.
        page: the library's own answer.
        hints: the first says least.
        trial: tries a function that takes what it should.
    """

    name: str
    signature: str
    goal: str
    told: str
    page: Answer
    hints: tuple[str, ...]
    trial: Trial

    def __str__(self) -> str:
        return (
            f"Write  def {self.signature}:\n    {self.goal}.\n{self.told}\n"
            f"Then: dk.check.{self.name}(your_function)"
        )

    @property
    def title(self) -> str:
        """A few words for a list."""
        return f"{self.signature}: {self.goal}"

    def judge(self, mine: Answer) -> Verdict:
        """The verdict on an answer.

        Raises:
            TypeError: it is no function.
        """
        if not callable(mine):
            raise TypeError(
                f"dk.check.{self.name} judges a function, not {type(mine).__name__}. "
                f"Write def {self.signature} and pass it without calling it."
            )
        points: list[Point] = []
        try:
            if not _takes(mine, self.signature.count(",") + 1):
                yours = inspect.signature(mine)
                raise Mistake(f"write def {self.signature}: yours takes {yours}")
            for point in self.trial(mine):
                points.append(point)
        except NotAttempted:
            return Verdict(self.name, "not attempted", (), f"{self}\nStuck? dk.hint.{self.name}()")
        except Mistake as mistake:
            points.append(Point(False, str(mistake)))
            return Verdict(self.name, "not right yet", tuple(points), self.help)
        if all(p.good for p in points):
            return Verdict(self.name, "solved", tuple(points))
        return Verdict(self.name, "right, but not the best", tuple(points), self.help)

    @property
    def help(self) -> str:
        """The next hint."""
        return f"dk.hint.{self.name}() helps; dk.solution.{self.name}() shows the library's page."


def name_of(mine: Answer) -> str:
    """The name of an answer."""
    return getattr(mine, "__name__", type(mine).__name__)


def attempt(mine: Answer, case: str, *arguments: Any) -> Any:
    """The value that an answer returns in a case.

    Raises:
        NotAttempted: it is a stub.
        Mistake: it raises something else.
    """
    try:
        return mine(*arguments)
    except NotImplementedError:
        raise NotAttempted from None
    except Exception as error:
        raise Mistake(f"{case}: {raised(error, mine)}") from error


def raised(error: Exception, mine: Answer) -> str:
    """The exception of an answer, and the learner's line that raised it."""
    lines = [
        frame for frame in traceback.extract_tb(error.__traceback__) if frame.name == name_of(mine)
    ]
    where = f" in  {lines[-1].line}" if lines and lines[-1].line else ""
    return f"{name_of(mine)} raised {type(error).__name__}: {error}{where}"


def _takes(mine: Answer, count: int) -> bool:
    """True if a function can be called with so many arguments."""
    try:
        inspect.signature(mine).bind(*range(count))
    except TypeError:
        return False
    except ValueError:  # compiled: it does not say what it takes
        return True
    return True


def _indented(text: str) -> str:
    return text.replace("\n", "\n    ")


# -- the answer key ----------------------------------------------------------------------


class Words(str):
    """A text that shows without quotes."""

    def __repr__(self) -> str:
        return str(self)


class Source(Words):
    """A program's text, which a notebook shows with its colours."""

    def _repr_markdown_(self) -> str:
        return f"```python\n{self}\n```"


def source(page: Callable[..., Any]) -> Source:
    """A page with the imports that it needs."""
    home = inspect.getmodule(inspect.unwrap(page))
    assert home is not None
    code = inspect.getsource(page).rstrip()
    used = {node.id for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)}
    return Source("\n".join([*_imports(home, used - {page.__name__}), "", "", code]))


def _imports(home: ModuleType, used: set[str]) -> Iterator[str]:
    """The lines with which a module gets these names, and one for those it defines."""
    own = []
    for node in ast.parse(inspect.getsource(home)).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            node.names = [a for a in node.names if (a.asname or a.name) in used]
            if node.names:
                yield ast.unparse(node)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in used:
            own.append(node.name)
    if own:
        yield f"from {home.__name__} import {', '.join(own)}"
