"""Export the exercises of lessons as nbgrader assignments with solutions, tests and points.

Each lesson becomes a notebook without the lesson's prose. Existing files are never overwritten.
``nbgrader generate_assignment`` removes the solutions.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from distkit.errors import DistkitError
from distkit_course import questions
from distkit_course.exercises import LESSONS, QUESTIONS, TASKS
from distkit_course.questions import LEVELS, Question
from distkit_course.task import Task, source

#: Maximum number of points for a question, which an instructor grades.
_POINTS = len(LEVELS)

#: Code of a check cell: nbgrader reads the last value as points, and output to stderr as a failure.
_CHECK = """import sys
from contextlib import redirect_stderr

import distkit as dk

with redirect_stderr(sys.stdout):
    verdict = dk.check.{name}({name})
print(verdict)
verdict.credit"""


def write(folder: Path, lessons: Iterable[str] = (), exercises: Iterable[str] = ()) -> list[Path]:
    """Write ``folder/source/LESSON/LESSON.ipynb`` for each lesson.

    Args:
        folder: the root of an nbgrader course.
        lessons: prefixes of lesson names, such as "02"; if empty, all lessons.
        exercises: names of exercises and questions; if empty, all.

    Raises:
        DistkitError: a lesson or exercise is unknown, or one of the files exists.
    """
    selected = questions.lessons(lessons)
    known = {name for lesson in selected for name in LESSONS[lesson]}
    if unknown := set(exercises) - known:
        raise DistkitError(
            f"these lessons have no exercise {min(unknown)!r}. "
            f"Available: {', '.join(sorted(known))}"
        )
    parts = {
        lesson: [name for name in LESSONS[lesson] if not exercises or name in exercises]
        for lesson in selected
    }
    files = [folder / "source" / name / f"{name}.ipynb" for name in selected if parts[name]]
    if existing := [file for file in files if file.exists()]:
        raise DistkitError(f"{existing[0]} already exists. Remove it, or choose another folder.")
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(notebook(file.stem, parts[file.stem]), indent=1, ensure_ascii=False)
        file.write_text(text + "\n", encoding="utf-8")
    return files


def notebook(lesson: str, names: Iterable[str]) -> dict[str, Any]:
    """Return the assignment for a lesson's exercises, in nbformat 4.5."""
    cells = [_cell("markdown", f"title-{lesson}", f"# Exercises: {lesson}", locked=True)]
    for name in names:
        cells += _task_cells(TASKS[name]) if name in TASKS else _question_cells(QUESTIONS[name])
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def _task_cells(task: Task) -> list[dict[str, Any]]:
    prompt = f"## {task.name}\n\n```text\n{task.question}\n```"
    check = _CHECK.format(name=task.name)
    return [
        _cell("markdown", f"about-{task.name}", prompt, locked=True),
        _cell("code", task.name, solved(task), solution=True),
        _cell("code", f"check-{task.name}", check, grade=True, locked=True, points=task.worth),
    ]


def _question_cells(question: Question) -> list[dict[str, Any]]:
    answers = f"### BEGIN SOLUTION\n{question.answers}\n### END SOLUTION"
    prompt = f"## {question.name}\n\n{question.question}"
    return [
        _cell("markdown", f"about-{question.name}", prompt, locked=True),
        _cell("markdown", question.name, answers, grade=True, solution=True, points=_POINTS),
    ]


def _cell(
    kind: str,
    name: str,
    text: str,
    *,
    grade: bool = False,
    solution: bool = False,
    locked: bool = False,
    points: int = 0,
) -> dict[str, Any]:
    """Return a cell with nbgrader's metadata; only graded cells have points."""
    metadata: dict[str, Any] = {
        "grade": grade,
        "grade_id": name,
        "locked": locked,
        "schema_version": 3,
        "solution": solution,
        "task": False,
    }
    if grade:
        metadata["points"] = points
    cell = {"cell_type": kind, "id": name[:64], "metadata": {"nbgrader": metadata}, "source": text}
    return {**cell, "execution_count": None, "outputs": []} if kind == "code" else cell


def solved(task: Task) -> str:
    """Return the exercise's function with the solution between nbgrader's markers."""
    name, _, parameters = task.signature.partition("(")
    lines = [line for line in str(source(task.solution)).splitlines() if "__future__" not in line]
    call = f"return {task.solution.__name__}({parameters}"
    body = "\n".join(["### BEGIN SOLUTION", *lines, call, "### END SOLUTION"])
    return f"def {name}({parameters}:\n{textwrap.indent(body, '    ')}"
