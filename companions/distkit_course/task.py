"""The parts of an exercise: a name, a stub, hints, a solution, and its judge."""

from __future__ import annotations

import ast
import inspect
import re
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from html import escape
from types import ModuleType
from typing import Any

from distkit.diagnosis.findings import linked
from distkit.trace.trace import Trace

Answer = Callable[..., Any]


class NotAttempted(Exception):
    """The answer is a stub."""


class Mistake(Exception):
    """The mistakes in an answer, in words; and the trace that shows them, if there is one."""

    def __init__(self, text: str, trace: Trace | None = None) -> None:
        super().__init__(text)
        self.trace = trace


PASS, FAIL, WASTEFUL, BLOCKED = "pass", "fail", "wasteful", "blocked"
NOT_ATTEMPTED = "not attempted"

#: Their colours in a notebook, and their signs.
_COLOURS = {PASS: "#009e73", NOT_ATTEMPTED: "#7f8c99", BLOCKED: "#7f8c99"}
_WRONG = "#d55e00"


@dataclass(frozen=True)
class Criterion:
    """One thing that was looked at.

    Args:
        name: in a word: "values", "messages".
        text: what was seen.
        status: pass, fail, wasteful (right, but more than needed) or blocked (not to be judged
            here and now: worth nothing, and costs nothing).
        trace: of the run in which it was seen.
    """

    name: str
    text: str
    status: str = PASS
    trace: Trace | None = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        return (
            f"{'✓' if self.status == PASS else '–' if self.status == BLOCKED else '✗'} {self.text}"
        )


@dataclass(frozen=True)
class Verdict:
    """The verdict on an answer; true when it passes.

    ``status`` is "pass", "fail", "wasteful", "blocked" or "not attempted"; ``points`` of ``max``
    are given for it, one for each criterion that is met.
    """

    name: str
    status: str
    criteria: tuple[Criterion, ...] = ()
    advice: str = ""
    worth: int = 0

    def __bool__(self) -> bool:
        return self.status == PASS

    @property
    def points(self) -> int:
        """The points that it gets."""
        return sum(c.status == PASS for c in self.criteria)

    @property
    def max(self) -> int:
        """The points that it can get: none for what is blocked."""
        return self.worth - sum(c.status == BLOCKED for c in self.criteria)

    @property
    def credit(self) -> float:
        """The points for graders that know no blocked criteria: the same part of all points."""
        return self.points * self.worth / self.max if self.max else 0.0

    def __repr__(self) -> str:
        lines = [f"{self.name}: {self.status}"]
        lines += [f"  {_indented(str(c))}" for c in self.criteria]
        return "\n".join([*lines, *([f"  {self.advice}"] if self.advice else [])])

    def _repr_html_(self) -> str:
        """The same for a notebook."""
        colour = _COLOURS.get(self.status, _WRONG)
        rows = "".join(
            f'<tr><td style="color:{_COLOURS.get(c.status, _WRONG)};vertical-align:top">'
            f'{str(c)[0]}</td><td style="text-align:left;white-space:pre-wrap">'
            f"{linked(c.text)}</td></tr>"
            for c in self.criteria
        )
        advice = self.advice and f'<div style="white-space:pre-wrap">{linked(self.advice)}</div>'
        return (
            f'<div style="border-left:4px solid {colour};padding:4px 12px"><strong>'
            f"{escape(self.name)}: {self.status}</strong><table>{rows}</table>{advice}</div>"
        )


#: Tries an answer: yields a criterion after the other. Raises NotAttempted or Mistake.
Trial = Callable[[Answer], Iterator[Criterion]]


@dataclass(frozen=True)
class Task:
    """One exercise.

    Args:
        name: as in ``dk.check.NAME``.
        signature: the line to begin with.
        goal: what the function has to do.
        details: what its writer has to know.
        solution: an answer that passes.
        hints: the first says least.
        trial: tries a function that takes what it should.
        wrong: usual mistakes, and what is said of each.
        worth: its points: one for each criterion that the solution meets.
    """

    name: str
    signature: str
    goal: str
    details: str
    solution: Answer
    hints: tuple[str, ...]
    trial: Trial
    wrong: tuple[tuple[Answer, str], ...]
    worth: int = 1

    def __str__(self) -> str:
        return f"{self.question}\nThen: dk.check.{self.name}(your_function)"

    @property
    def question(self) -> str:
        """What is to be written."""
        return f"Write  def {self.signature}:\n    {self.goal}.\n{self.details}".rstrip()

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
        try:
            criteria = [*self._tried(mine)]
        except NotAttempted:
            return self.not_attempted
        seldom = {c.status for c in criteria} - {PASS}
        status = next((s for s in (FAIL, WASTEFUL, BLOCKED) if s in seldom), PASS)
        advice = self.help if seldom - {BLOCKED} else ""
        return Verdict(self.name, status, tuple(criteria), advice, self.worth)

    @property
    def not_attempted(self) -> Verdict:
        """The verdict where there is no answer yet: it tells the task."""
        advice = f"{self}\nStuck? dk.hint.{self.name}()"
        return Verdict(self.name, NOT_ATTEMPTED, (), advice, self.worth)

    def _tried(self, mine: Answer) -> Iterator[Criterion]:
        """The criteria up to the first mistake, which is one, too."""
        try:
            if not _takes(mine, self.signature.count(",") + 1):
                yours = inspect.signature(mine)
                takes = yours if yours.parameters else "no arguments"
                raise Mistake(f"write def {self.signature}: yours takes {takes}")
            yield from self.trial(mine)
        except Mistake as mistake:
            yield Criterion("values", str(mistake), FAIL, mistake.trace)

    @property
    def help(self) -> str:
        """The next hint."""
        return f"dk.hint.{self.name}() helps; dk.solution.{self.name}() shows a solution."


def name_of(mine: Answer) -> str:
    """The name of an answer."""
    return getattr(mine, "__name__", type(mine).__name__)


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


def source(function: Callable[..., Any]) -> Source:
    """The text of a function with the imports that it needs, without its entry in a catalogue."""
    home = inspect.getmodule(inspect.unwrap(function))
    assert home is not None
    text = inspect.getsource(function)
    code = re.sub(r"(?ms)^@\w+\.register\(.*?^\)\n|  # type: [^\n]*", "", text).rstrip()
    used = {node.id for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)}
    return Source("\n".join([*_imports(home, used - {function.__name__}), "", "", code]))


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
