"""An exercise: its name, signature, hints, solution and judge."""

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

from distkit.diagnosis.rules import linked
from distkit.trace.trace import Trace

Answer = Callable[..., Any]


class NotAttempted(Exception):
    """Raised if an answer is still a stub."""


class WrongAnswer(Exception):
    """Raised for a wrong answer, with a description and, if available, the trace that shows it."""

    def __init__(self, text: str, trace: Trace | None = None) -> None:
        super().__init__(text)
        self.trace = trace


PASS, FAIL, WASTEFUL, BLOCKED = "pass", "fail", "wasteful", "blocked"
NOT_ATTEMPTED = "not attempted"

#: The code of a function without a body.
_STUB = (lambda: None).__code__

#: Colors of the statuses in a notebook.
_COLORS = {PASS: "#009e73", NOT_ATTEMPTED: "#7f8c99", BLOCKED: "#7f8c99"}
_WRONG = "#d55e00"


@dataclass(frozen=True)
class Criterion:
    """One checked property of an answer.

    Args:
        name: one word, such as "values" or "messages".
        text: the observation.
        status: pass, fail, wasteful (correct, but more expensive than necessary) or blocked (cannot
            be judged on this machine at the moment; does not affect the score).
        trace: the trace of the run.
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
    """The verdict on an answer. It is true if the answer passes.

    ``status`` is "pass", "fail", "wasteful", "blocked" or "not attempted". The answer earns
    ``points`` out of ``max``, one for each criterion that it meets.
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
        """The number of points that the answer earned."""
        return sum(c.status == PASS for c in self.criteria)

    @property
    def max(self) -> int:
        """The maximum number of points, not counting blocked criteria."""
        return self.worth - sum(c.status == BLOCKED for c in self.criteria)

    @property
    def credit(self) -> float:
        """The points scaled to ``worth``, for graders that do not support blocked criteria."""
        return self.points * self.worth / self.max if self.max else 0.0

    def __repr__(self) -> str:
        lines = [f"{self.name}: {self.status}"]
        lines += [f"  {c}".replace("\n", "\n    ") for c in self.criteria]
        return "\n".join([*lines, *([f"  {self.advice}"] if self.advice else [])])

    def _repr_html_(self) -> str:
        """Return the verdict as HTML."""
        color, style = _COLORS.get(self.status, _WRONG), "margin-top:6px;white-space:pre-wrap"
        rows = "".join(
            f'<tr><td style="color:{_COLORS.get(c.status, _WRONG)};vertical-align:top">'
            f'{str(c)[0]}</td><td style="text-align:left;white-space:pre-wrap">'
            f"{linked(c.text)}</td></tr>"
            for c in self.criteria
        )
        advice = re.sub(
            r"(?m)(def .+(?=:$)|dk(?:\.\w+)+\(\w*\))",
            r"<code>\1</code>",
            linked(re.sub(r"(?<=[^\n]{60}[^\n.:])\n(?=\S)", " ", self.advice)),  # unwrapped
        )
        return (
            f'<div style="border-left:4px solid {color};padding:4px 12px"><strong>'
            f"{escape(self.name)}: {self.status}</strong><table>{rows}</table>"
            f'<div style="{style}">'
            + re.sub(r"\n(?=Then: |Stuck)", f'</div><div style="{style}">', advice)
            + "</div></div>"
        )


#: Tests an answer and yields criteria. Raises NotAttempted or WrongAnswer.
Trial = Callable[[Answer], Iterator[Criterion]]


@dataclass(frozen=True)
class Task:
    """One exercise.

    Args:
        name: the name in ``dk.check.NAME``.
        signature: the function's name and parameters.
        goal: what the function must do, in one sentence.
        details: additional information about the parameters and the result.
        solution: an answer that passes.
        hints: hints, the vaguest first.
        trial: the test; called only if the function takes the right number of parameters.
        wrong: common wrong answers, each with text that its verdict contains.
        worth: how many points the exercise is worth, one per criterion that the solution meets.
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
        """The text of the exercise."""
        return f"Write def {self.signature}:\n    {self.goal}.\n{self.details}".rstrip()

    @property
    def title(self) -> str:
        """The title in a list."""
        return f"{self.signature}: {self.goal}"

    def judge(self, answer: Answer) -> Verdict:
        """Return the verdict on an answer.

        Raises:
            TypeError: the answer is not a function.
        """
        if not callable(answer):
            raise TypeError(
                f"dk.check.{self.name} expects a function, not {type(answer).__name__}. "
                f"Write def {self.signature} and pass it without calling it."
            )
        try:
            criteria = [*self._criteria(answer)]
        except NotAttempted:
            return self.not_attempted
        problems = {c.status for c in criteria} - {PASS}
        status = next((s for s in (FAIL, WASTEFUL, BLOCKED) if s in problems), PASS)
        advice = self.help if problems - {BLOCKED} else ""
        return Verdict(self.name, status, tuple(criteria), advice, self.worth)

    @property
    def not_attempted(self) -> Verdict:
        """The verdict if there is no answer; it shows the task."""
        advice = f"{self}\nStuck? dk.hint.{self.name}()"
        return Verdict(self.name, NOT_ATTEMPTED, (), advice, self.worth)

    def _criteria(self, answer: Answer) -> Iterator[Criterion]:
        """Yield criteria up to the first mistake, which is yielded as a failed criterion."""
        try:
            if not _accepts(answer, self.signature.count(",") + 1):
                signature = inspect.signature(answer)
                parameters = signature if signature.parameters else "no arguments"
                raise WrongAnswer(f"write def {self.signature}; yours takes {parameters}")
            code = getattr(answer, "__code__", None)
            if code and (code.co_code, code.co_consts) == (_STUB.co_code, _STUB.co_consts):
                raise NotAttempted  # before starting any ranks
            yield from self.trial(answer)
        except WrongAnswer as mistake:
            yield Criterion("values", str(mistake), FAIL, mistake.trace)

    @property
    def help(self) -> str:
        """The advice after a wrong answer."""
        return f"dk.hint.{self.name}() shows a hint; dk.solution.{self.name}() shows a solution."


def name_of(answer: Answer) -> str:
    """Return the name of an answer."""
    return getattr(answer, "__name__", type(answer).__name__)


def raised(error: Exception, answer: Answer) -> str:
    """Describe an answer's exception, with the line of the learner's code that raised it."""
    lines = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.name == name_of(answer)
    ]
    where = f" in  {lines[-1].line}" if lines and lines[-1].line else ""
    return (
        str(error)  # a judge's own message
        if isinstance(error, WrongAnswer)
        else f"{name_of(answer)} raised {type(error).__name__}: {error}{where}"
    )


def _accepts(answer: Answer, count: int) -> bool:
    """Return whether a function can be called with ``count`` arguments."""
    try:
        inspect.signature(answer).bind(*range(count))
    except TypeError:
        return False
    except ValueError:  # a builtin without a signature
        return True
    return True


# -- solutions ----------------------------------------------------------------------


class PlainText(str):
    """A string whose repr has no quotes."""

    def __repr__(self) -> str:
        return str(self)


class Source(PlainText):
    """Source code that a notebook highlights."""

    def _repr_markdown_(self) -> str:
        return f"```python\n{self}\n```"


def source(function: Callable[..., Any]) -> Source:
    """Return a function's source with its imports and without its registration decorator."""
    module = inspect.getmodule(inspect.unwrap(function))
    assert module is not None
    text = inspect.getsource(function)
    code = re.sub(r"(?ms)^@\w+\.register\(.*?^\)\n|  # type: [^\n]*", "", text).rstrip()
    used = {node.id for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)}
    return Source("\n".join([*_imports(module, used - {function.__name__}), "", "", code]))


def _imports(module: ModuleType, used: set[str]) -> Iterator[str]:
    """Yield the module's imports of names in ``used``, then an import of those that it defines."""
    defined = []
    for node in ast.parse(inspect.getsource(module)).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            node.names = [a for a in node.names if (a.asname or a.name) in used]
            if node.names:
                yield ast.unparse(node)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in used:
            defined.append(node.name)
    if defined:
        yield f"from {module.__name__} import {', '.join(defined)}"
