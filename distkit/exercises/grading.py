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
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distkit.errors import DistkitError
from distkit.exercises import TASKS, feedback
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
    parsed = [*map(_parsed, cells)]
    found = _answers(cells, parsed)
    own = {at for at, _ in found.values()}
    shared = [d for at, tree in enumerate(parsed) if at not in own for d in _definitions(tree)]
    return {name: _written(parsed[at], f, shared) for name, (at, f) in found.items()}


def _cells(notebook: dict[str, Any]) -> list[str]:
    return ["".join(c["source"]) for c in notebook["cells"] if c["cell_type"] == "code"]


def _parsed(cell: str) -> ast.Module | str:
    """The program of a cell, without the lines that only IPython knows; or what is wrong."""
    try:
        return ast.parse(re.sub(r"^\s*[%!].*", "", cell, flags=re.M))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return f"it cannot be read: {error}"


def _definitions(tree: ast.Module | str) -> list[str]:
    nodes = [] if isinstance(tree, str) else [node for node in tree.body if _defines(node)]
    return [ast.unparse(_if_there(n) if _assigns(n) else n) for n in nodes]


def _defines(node: ast.stmt) -> bool:
    if _assigns(node):
        return not any(isinstance(n, ast.Call) for n in ast.walk(node))
    return isinstance(node, _DEFINITIONS)


def _assigns(node: ast.stmt) -> bool:
    return isinstance(node, ast.Assign | ast.AnnAssign)


def _if_there(node: ast.stmt) -> ast.stmt:
    """Leave out what only a run of the notebook has, such as ``first = run.results[0]``.

    An answer that needs it all the same gets a NameError with its name.
    """
    otherwise = ast.ExceptHandler(ast.Name("Exception"), None, [ast.Pass()])
    return ast.Try([node], [otherwise], [], [])


def _answers(cells: list[str], parsed: list[ast.Module | str]) -> dict[str, tuple[int, str]]:
    """Of each exercise the cell with its answer, and the name that the function has there.

    An answer is handed to its check, or has its exercise's name and takes arguments, as all
    exercises do. What a lesson defines by such a name, to show something, takes none.
    """
    found, homes = dict[str, tuple[int, str]](), dict[str, int]()
    for at, (cell, tree) in enumerate(zip(cells, parsed, strict=True)):
        for function, takes in _functions(cell, tree):
            homes[function] = at
            if takes and function in TASKS:
                found[function] = at, function
        handed = [(name, f) for name, f in _CHECKED.findall(cell) if name in TASKS and f in homes]
        found.update({name: (homes[f], f) for name, f in handed})
    return found


def _functions(cell: str, tree: ast.Module | str) -> Iterator[tuple[str, bool]]:
    """The functions that a cell defines, and whether they take arguments."""
    if isinstance(tree, str):
        for name, none in re.findall(r"^def (\w+)\((\s*\))?", cell, flags=re.M):
            yield name, not none
    else:
        yield from ((n.name, _parameters(n) != 0) for n in _defs(tree))


def _defs(tree: ast.Module) -> list[ast.FunctionDef]:
    return [node for node in tree.body if isinstance(node, ast.FunctionDef)]


def _written(tree: ast.Module | str, name: str, shared: list[str]) -> Written | str:
    """An answer with what it may need of other cells; of a cell that is no Python, why not."""
    if isinstance(tree, str):
        return tree
    parameters = {node.name: _parameters(node) for node in _defs(tree)}
    return Written(name, "\n".join([*shared, *_definitions(tree)]), parameters[name])


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
    verdicts: list[Verdict] = field(default_factory=list)
    _task: str = ""
    _left: int = 0  # points of the exercise that are not decided

    def begin(self, task: Task) -> None:
        """An exercise is looked at: until it is judged it counts as failed."""
        self._task, self._left = task.name, task.worth
        self.write()

    def see(self, criterion: Criterion) -> None:
        """One criterion of the exercise is known; a mistake costs all that are left."""
        of = {BLOCKED: 0, FAIL: self._left}.get(criterion.status, 1)
        self._left -= self._left if criterion.status == FAIL else 1
        points = int(criterion.status == PASS)
        seen = self._row(criterion.name, criterion.status, points, of, criterion.text)
        self.criteria.append({**seen, "evidence": self._save(criterion)})
        self.write()

    def end(self, verdict: Verdict) -> None:
        """The exercise is judged."""
        self.verdicts.append(verdict)
        if verdict.status == NOT_ATTEMPTED:
            self.criteria.append(self._row("attempt", NOT_ATTEMPTED, 0, self._left, ""))
        self._left = 0
        self.write()

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

    def write(self) -> None:
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
        """0: all pass; 1: some do not, or there is none; 2: some are blocked, all others pass."""
        if not self.criteria:
            return 1
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
        path: of the report, which has the submission's name. A student's page comes beside it.
        names: of the exercises; those in the submission if there are none.

    Raises:
        DistkitError: there is no such exercise, or the submission cannot be read.
    """
    if unknown := [name for name in names if name not in TASKS]:
        raise DistkitError(f"there is no exercise {unknown[0]!r}. There are: {', '.join(TASKS)}.")
    answers = read(submission)
    report = Report(path, path.stem)
    report.write()  # also of a submission without any answer
    for name in names or answers:
        report.begin(TASKS[name])
        report.end(_judged(TASKS[name], answers.get(name), report))
    page = feedback.page(path.stem, report.verdicts)
    # an answer may have put anything into its messages and marks
    path.with_suffix(".html").write_text(page, encoding="utf-8", errors="xmlcharrefreplace")
    return report


def _judged(task: Task, answer: Written | str | None, report: Report) -> Verdict:
    """One exercise; what the answer prints is not shown."""
    if answer is None:
        return Verdict(task.name, NOT_ATTEMPTED, worth=task.worth)
    if isinstance(answer, str):
        unread = Criterion("values", answer, FAIL)
        report.see(unread)
        return Verdict(task.name, FAIL, (unread,), worth=task.worth)
    with redirect_stdout(_Sink()), redirect_stderr(_Sink()):
        return task.judge(answer, report.see)


class _Sink(io.TextIOBase):
    """Takes what an answer prints."""

    def write(self, text: str) -> int:
        return len(text)


# -- a class ---------------------------------------------------------------------------------


def progress(reports: Iterable[Path]) -> str:
    """A class's points as CSV: a line for each report, a column for each exercise.

    All lines are out of the same exercises, those that any report has: where a report lacks one,
    its field is empty and its points count in ``max``. Only what was blocked lowers a ``max``.

    Raises:
        DistkitError: a file is no report.
    """
    rows, worth = [], dict[str, int]()
    for path in sorted(reports):
        try:
            report = json.loads(path.read_text(encoding="utf-8"))
            row = {name: report[name] for name in ("submission", "points", "max")}
            had = Counter[str]()
            for criterion in report["criteria"]:
                name = criterion["criterion"].partition(".")[0]
                row[name] = row.get(name, 0) + criterion["points"]
                had[name] += criterion["max"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DistkitError(f"{path} is no report of distkit grade: {error}") from error
        rows.append(row)
        worth |= {name: max(most, worth.get(name, 0)) for name, most in had.items()}
    for row in rows:
        row["max"] += sum(most for name, most in worth.items() if name not in row)
    table = io.StringIO()
    columns = ["submission", "points", "max", *worth]
    writer = csv.DictWriter(table, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return table.getvalue()
