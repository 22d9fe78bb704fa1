"""The exercises of the lessons as assignments of nbgrader: solutions in, points and tests beside.

A notebook for each lesson, apart from the lesson's prose: what students have begun is never
changed under its name. ``nbgrader generate_assignment`` takes the solutions out.
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

#: Points of a question, which a teacher gives.
_POINTS = len(LEVELS)

#: What the cell of a check does: nbgrader takes its last value as points, and output to stderr
#: for a failure.
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
        folder: of a course of nbgrader.
        lessons: beginnings of their names, such as "02"; all when there are none.
        exercises: names of exercises and questions; all when there are none.

    Raises:
        DistkitError: there is no such lesson or exercise, or one of the files is there already.
    """
    named = questions.lessons(lessons)
    known = {name for lesson in named for name in LESSONS[lesson]}
    if unknown := set(exercises) - known:
        raise DistkitError(
            f"there is no exercise {min(unknown)!r} in these lessons: {', '.join(sorted(known))}"
        )
    parts = {
        lesson: [name for name in LESSONS[lesson] if not exercises or name in exercises]
        for lesson in named
    }
    files = [folder / "source" / name / f"{name}.ipynb" for name in named if parts[name]]
    if there := [file for file in files if file.exists()]:
        raise DistkitError(f"{there[0]} is there already: remove it, or name another folder.")
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(notebook(file.stem, parts[file.stem]), indent=1, ensure_ascii=False)
        file.write_text(text + "\n", encoding="utf-8")
    return files


def notebook(lesson: str, names: Iterable[str]) -> dict[str, Any]:
    """The assignment of a lesson's exercises, as nbformat 4.5 has it."""
    cells = [_cell("markdown", f"title-{lesson}", f"# Exercises: {lesson}", locked=True)]
    for name in names:
        cells += _of_task(TASKS[name]) if name in TASKS else _of_question(QUESTIONS[name])
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def _of_task(task: Task) -> list[dict[str, Any]]:
    told = f"## {task.name}\n\n```text\n{task.question}\n```"
    check = _CHECK.format(name=task.name)
    return [
        _cell("markdown", f"about-{task.name}", told, locked=True),
        _cell("code", task.name, solved(task), solution=True),
        _cell("code", f"check-{task.name}", check, grade=True, locked=True, points=task.worth),
    ]


def _of_question(one: Question) -> list[dict[str, Any]]:
    answers = f"### BEGIN SOLUTION\n{one.answers}\n### END SOLUTION"
    told = f"## {one.name}\n\n{one.question}"
    return [
        _cell("markdown", f"about-{one.name}", told, locked=True),
        _cell("markdown", one.name, answers, grade=True, solution=True, points=_POINTS),
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
    """A cell with nbgrader's metadata; a cell without points must not have any."""
    told: dict[str, Any] = {
        "grade": grade,
        "grade_id": name,
        "locked": locked,
        "schema_version": 3,
        "solution": solution,
        "task": False,
    }
    if grade:
        told["points"] = points
    cell = {"cell_type": kind, "id": name[:64], "metadata": {"nbgrader": told}, "source": text}
    return {**cell, "execution_count": None, "outputs": []} if kind == "code" else cell


def solved(task: Task) -> str:
    """A function of the asked name with the solution inside, between nbgrader's marks."""
    name, _, parameters = task.signature.partition("(")
    text = [line for line in str(source(task.solution)).splitlines() if "__future__" not in line]
    call = f"return {task.solution.__name__}({parameters}"
    inside = "\n".join(["### BEGIN SOLUTION", *text, call, "### END SOLUTION"])
    return f"def {name}({parameters}:\n{textwrap.indent(inside, '    ')}"
