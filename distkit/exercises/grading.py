"""Grading of a submission: each exercise on its own, in a report that a crash does not lose.

A submission is a notebook or a Python file. Of it only imports, definitions and constants are
taken, and these run on the ranks of a check alone: nothing of it runs where the report is kept.
The report is one JSON object, written anew from memory after each criterion.
"""

from __future__ import annotations

import ast
import csv
import inspect
import io
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distkit.errors import DistkitError
from distkit.exercises import TASKS
from distkit.exercises.task import (
    BLOCKED,
    FAIL,
    NOT_ATTEMPTED,
    PASS,
    Criterion,
    Task,
    Verdict,
)

#: What a submission defines, at the top level of a cell.
_DEFINITIONS = ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef
#: A cell that hands a function over: ``dk.check.NAME(function)``.
_CHECKED = re.compile(r"\bcheck\.(\w+)\((\w+)\)")


# -- submissions -----------------------------------------------------------------------------


class Written:
    """A function as text: whoever calls it first runs the text, on a rank.

    Args:
        name: the function's name.
        text: of the definitions that it may need.
        parameters: how many arguments it takes; None if that is only known when it runs.
    """

    def __init__(self, name: str, text: str, parameters: int | None) -> None:
        self.__name__, self._text, self._space = name, text, dict[str, Any]()
        several, one = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY
        taken = [inspect.Parameter(f"x{i}", one) for i in range(parameters or 0)]
        any_number = [inspect.Parameter("xs", several)]
        self.__signature__ = inspect.Signature(any_number if parameters is None else taken)

    def __call__(self, *arguments: Any) -> Any:
        """Call it, where it is defined by now."""
        if not self._space:
            self._space["__name__"] = "submission"
            exec(compile(self._text, f"<{self.__name__}>", "exec"), self._space)
        return self._space[self.__name__](*arguments)


def read(submission: Path) -> dict[str, Written | str]:
    """The answers of a submission by exercise; of a cell that is no Python, why not.

    Raises:
        DistkitError: the file cannot be read.
    """
    try:
        text = submission.read_text(encoding="utf-8")
        cells = _cells(json.loads(text)) if submission.suffix == ".ipynb" else [text]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DistkitError(f"{submission} is no submission that can be read: {error}") from error
    parsed = [(_parsed(cell), [*_named(cell)]) for cell in cells]
    shared = [d for tree, named in parsed if not named for d in _definitions(tree)]
    found: dict[str, Written | str] = {}
    for tree, named in parsed:
        for name, function in named:
            if isinstance(tree, str):
                found[name] = tree
            elif node := _function(tree, function):
                text = "\n".join([*shared, *_definitions(tree)])
                found[name] = Written(function, text, _parameters(node))
    return found


def _cells(notebook: dict[str, Any]) -> list[str]:
    return ["".join(c["source"]) for c in notebook["cells"] if c["cell_type"] == "code"]


def _parsed(cell: str) -> ast.Module | str:
    """The program of a cell, without the lines that only IPython knows; or what is wrong."""
    try:
        return ast.parse(re.sub(r"^\s*[%!].*", "", cell, flags=re.M))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return f"it cannot be read: {error}"


def _definitions(tree: ast.Module | str) -> list[str]:
    return [] if isinstance(tree, str) else [ast.unparse(n) for n in tree.body if _defines(n)]


def _defines(node: ast.stmt) -> bool:
    if isinstance(node, ast.Assign | ast.AnnAssign):
        return node.value is not None and not any(isinstance(n, ast.Call) for n in ast.walk(node))
    return isinstance(node, _DEFINITIONS)


def _named(cell: str) -> Iterator[tuple[str, str]]:
    """Which exercises a cell is for, and the function that is meant."""
    handed = [(name, f) for name, f in _CHECKED.findall(cell) if name in TASKS]
    defined = re.findall(r"^def (\w+)\(", cell, flags=re.M)
    yield from ((name, name) for name in defined if name in TASKS)
    yield from ((name, f) for name, f in handed if f in defined)


def _function(tree: ast.Module, name: str) -> ast.FunctionDef | None:
    found = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == name]
    return found[-1] if found else None


def _parameters(node: ast.FunctionDef) -> int | None:
    """How many arguments a function takes; None if it may take several numbers of them."""
    given = node.args
    plain = not (given.vararg or given.kwonlyargs or given.defaults or node.decorator_list)
    return len(given.posonlyargs) + len(given.args) if plain else None


# -- reports ---------------------------------------------------------------------------------


@dataclass
class Report:
    """What is known of a submission so far; written to a file whenever more is known."""

    path: Path
    submission: str
    criteria: list[dict[str, Any]] = field(default_factory=list)
    _task: str = ""
    _left: int = 0  # points of the exercise that are not decided

    def begin(self, task: Task) -> None:
        """An exercise is looked at: until it is judged it counts as failed."""
        self._task, self._left = task.name, task.worth
        self._write()

    def see(self, criterion: Criterion) -> None:
        """One criterion of the exercise is known; a mistake costs all that are left."""
        of = {BLOCKED: 0, FAIL: self._left}.get(criterion.status, 1)
        self._left -= self._left if criterion.status == FAIL else 1
        points = int(criterion.status == PASS)
        seen = self._row(criterion.name, criterion.status, points, of, criterion.text)
        self.criteria.append({**seen, "evidence": self._save(criterion)})
        self._write()

    def end(self, verdict: Verdict) -> None:
        """The exercise is judged."""
        if verdict.status == NOT_ATTEMPTED:
            self.criteria.append(self._row("attempt", NOT_ATTEMPTED, 0, self._left, ""))
        self._left = 0
        self._write()

    def _row(self, name: str, status: str, points: int, of: int, message: str) -> dict[str, Any]:
        return {
            "criterion": f"{self._task}.{name}",
            "status": status,
            "points": points,
            "max": of,
            "message": message,
            "evidence": None,
        }

    def _save(self, criterion: Criterion) -> str | None:
        """The trace of what is not right, beside the report."""
        if criterion.trace is None or criterion.status == PASS:
            return None
        folder = self.path.with_suffix("")
        folder.mkdir(exist_ok=True)
        file = folder / f"{self._task}.{criterion.name}.gz"
        criterion.trace.save(file)
        return str(file.relative_to(self.path.parent))

    def _write(self) -> None:
        """Replace the file by what is known now."""
        undecided = [self._row("end", FAIL, 0, self._left, "the check did not end")]
        rows = self.criteria + undecided * bool(self._left)
        whole = {
            "submission": self.submission,
            "points": sum(row["points"] for row in rows),
            "max": sum(row["max"] for row in rows),
            "criteria": rows,
        }
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps(whole, indent=2, ensure_ascii=False), encoding="utf-8")
        new.replace(self.path)

    @property
    def exit_code(self) -> int:
        """0: all pass; 1: some do not; 2: some are blocked, and all others pass."""
        seen = {c["status"] for c in self.criteria} - {PASS}
        return 0 if not seen else 2 if seen == {BLOCKED} else 1


def titles(submissions: Sequence[Path]) -> list[str]:
    """A name for each submission: its file's, or its path's where two files have the same.

    >>> titles([Path("in/ada.py"), Path("in/bob.ipynb")])
    ['ada', 'bob']
    >>> titles([Path("in/ada/02.ipynb"), Path("in/bob/02.ipynb")])
    ['ada-02.ipynb', 'bob-02.ipynb']
    """
    names = [path.stem for path in submissions]
    if len({*names}) == len(names):
        return names
    files = [path.resolve() for path in submissions]
    above = os.path.commonpath([path.parent for path in files])
    return ["-".join(path.relative_to(above).parts) for path in files]


def grade(submission: Path, path: Path, names: Sequence[str] = ()) -> Report:
    """Judge a submission's exercises one after the other; what one does costs no other.

    Args:
        submission: a notebook or a Python file.
        path: of the report, which has the submission's name.
        names: of the exercises; those in the submission if there are none.

    Raises:
        DistkitError: there is no such exercise, or the submission cannot be read.
    """
    if unknown := [name for name in names if name not in TASKS]:
        raise DistkitError(f"there is no exercise {unknown[0]!r}. There are: {', '.join(TASKS)}.")
    answers = read(submission)
    report = Report(path, path.stem)
    for name in names or answers:
        report.begin(TASKS[name])
        report.end(_judged(TASKS[name], answers.get(name), report))
    return report


def _judged(task: Task, answer: Written | str | None, report: Report) -> Verdict:
    """One exercise; what the answer prints is not shown."""
    if answer is None:
        return Verdict(task.name, NOT_ATTEMPTED, worth=task.worth)
    if isinstance(answer, str):
        report.see(Criterion("values", answer, FAIL))
        return Verdict(task.name, FAIL, worth=task.worth)
    with redirect_stdout(_Sink()), redirect_stderr(_Sink()):
        return task.judge(answer, report.see)


class _Sink(io.TextIOBase):
    """Takes what an answer prints."""

    def write(self, text: str) -> int:
        return len(text)


# -- a class ---------------------------------------------------------------------------------


def progress(reports: Iterable[Path]) -> str:
    """A class's points as CSV: a line for each report, a column for each exercise.

    Raises:
        DistkitError: a file is no report.
    """
    rows, names = [], dict[str, None]()
    for path in sorted(reports):
        try:
            report = json.loads(path.read_text(encoding="utf-8"))
            row = {"submission": report["submission"], "points": report["points"]}
            row["max"] = report["max"]
            for criterion in report["criteria"]:
                name = criterion["criterion"].partition(".")[0]
                names[name] = None
                row[name] = row.get(name, 0) + criterion["points"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DistkitError(f"{path} is no report of distkit grade: {error}") from error
        rows.append(row)
    table = io.StringIO()
    writer = csv.DictWriter(table, ["submission", "points", "max", *names], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return table.getvalue()
