"""Submissions are graded independently, by distkit and by nbgrader."""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import nbformat
import psutil
import pytest
from waiting import wait_until

import distkit as dk
from benchmarks.lab import isolated_environment
from distkit.cli import main
from distkit.errors import DistkitError
from distkit_course import assignments
from distkit_course.assignments import solved
from distkit_course.exercises import LESSONS, QUESTIONS, TASKS
from distkit_course.submissions import read
from tests.stress.course.classroom import hostile_answer

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
CORRECT = "def bubble(ranks, microbatches):\n    return (ranks - 1) / (microbatches + ranks - 1)\n"
#: The fastest exercises: those on one rank, except bubble, which each readable submission solves.
FAST_EXERCISES = [
    name for name in TASKS if name != "bubble" and ".Calls" in repr(type(TASKS[name].trial))
]


def grades(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


# -- a class with hostile submissions ------------------------------------------------------------

#: A sample of hostile answers, each to a different exercise; ``make stress`` submits all.
HOSTILE_KINDS = [
    "os._exit",
    "an endless loop",
    "too much memory",
    "a child that ignores SIGTERM",
    "a patched judge",
    "a daemon that writes later",
]
BENIGN = "bob", "zoe"


class Graded:
    """The reports and the command's output after a class has been graded."""

    def __init__(self, folder: Path) -> None:
        self.reports = folder / "reports"
        (folder / "in").mkdir()
        wrong = solved(TASKS["swap"]).replace("return swap(x, y)", "swap(x, y); swap(x, y)")
        self._write(folder, "bob.py", "\ufeff" + "\n" * 200_000 + CORRECT + "\n\n" + wrong)
        self._write(folder, "zoe.py", CORRECT)
        self._write(folder, "none.ipynb", "null")
        pairs = zip(HOSTILE_KINDS, FAST_EXERCISES[: len(HOSTILE_KINDS)], strict=True)
        texts = [hostile_answer(TASKS[name], kind, self.reports) for kind, name in pairs]
        self._write(folder, "harm.py", "\n\n".join([*texts, CORRECT]))
        self.id = uuid.uuid4().hex
        completed = subprocess.run(
            [sys.executable, "-m", "distkit", "grade", *sorted(map(str, folder.glob("in/*")))],
            cwd=folder,
            env={**os.environ, "GRADED": self.id},
            capture_output=True,
            text=True,
            timeout=800,
        )
        self.code, self.stdout, self.stderr = (
            completed.returncode,
            completed.stdout,
            completed.stderr,
        )

    def _write(self, folder: Path, name: str, text: str) -> None:
        (folder / "in" / name).write_text(text)

    def rows(self, name: str, exercise: str) -> list[tuple[str, int, int, str]]:
        """Return the status, points, maximum and message of each of an exercise's criteria."""
        rows = grades(self.reports / f"{name}.json")["criteria"]
        columns = ("status", "points", "max", "message")
        return [
            tuple(row[key] for key in columns)
            for row in rows
            if row["criterion"].startswith(f"{exercise}.")
        ]

    def processes(self) -> list[psutil.Process]:
        """Return the running processes that were started during grading."""
        return [p for p in psutil.process_iter() if self.id in environment_values(p)]


def environment_values(process: psutil.Process) -> str:
    try:
        return "".join(process.environ().values())
    except (psutil.Error, OSError):
        return ""


@pytest.fixture(scope="module")
def graded(tmp_path_factory: pytest.TempPathFactory) -> Graded:
    return Graded(tmp_path_factory.mktemp("class"))


@pytest.mark.timeout(900)
def test_hostile_answers_score_zero_and_the_correct_answer_scores(graded: Graded) -> None:
    for exercise in FAST_EXERCISES[: len(HOSTILE_KINDS)]:
        ((status, points, most, _),) = graded.rows("harm", exercise)
        assert status in ("fail", "not attempted")
        assert (points, most) == (0, TASKS[exercise].worth)
    assert graded.rows("harm", "bubble") == [("pass", 1, 1, "correct in 12 cases")]
    assert grades(graded.reports / "harm.json")["points"] == 1


@pytest.mark.parametrize("name", BENIGN)
def test_reports_of_other_submissions_are_unaffected(graded: Graded, name: str) -> None:
    assert graded.rows(name, "bubble") == [("pass", 1, 1, "correct in 12 cases")]
    report = grades(graded.reports / f"{name}.json")
    assert report["submission"] == name
    evidence = [row["evidence"] for row in report["criteria"] if row["evidence"]]
    assert len(evidence) == (name == "bob")
    assert all((graded.reports / file).stat().st_size > 500 for file in evidence)


def test_unreadable_submission_has_a_report_with_the_reason(graded: Graded) -> None:
    reason = "none.ipynb cannot be read: it is not a notebook"
    assert graded.rows("none", "submission") == [("fail", 0, 0, reason)]


def test_grader_executes_nothing_from_a_submission_and_leaves_no_process(graded: Graded) -> None:
    assert not (graded.reports.parent / "MARK").exists()
    assert graded.code == 1
    assert len(graded.stdout.splitlines()) == len([*graded.reports.glob("*.json")])
    assert "Traceback" not in graded.stderr
    wait_until(lambda: not graded.processes())


# -- a report ------------------------------------------------------------------------------------


def test_report_lists_each_criterion_and_keeps_the_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = solved(TASKS["swap"]).replace("return swap(x, y)", "swap(x, y); return swap(x, y)")
    (tmp_path / "one.py").write_text(f"{wrong}\n\n{CORRECT}")
    names = ["--exercises", "swap,bubble,relay"]
    assert main(["grade", str(tmp_path / "one.py"), "--reports", str(tmp_path), *names]) == 1
    assert "3 of 6 points" in capsys.readouterr().out
    rows = grades(tmp_path / "one.json")["criteria"]
    assert [(r["criterion"], r["status"], r["points"], r["max"]) for r in rows] == [
        ("swap.values", "pass", 1, 1),
        ("swap.messages", "wasteful", 0, 1),
        ("swap.calls", "pass", 1, 1),
        ("bubble.values", "pass", 1, 1),
        ("relay.attempt", "not attempted", 0, 2),
    ]
    assert rows[1]["message"].startswith("2 messages sent by the busiest rank; 1 suffices")
    assert dk.Trace.load(tmp_path / rows[1]["evidence"]).messages


def test_reports_are_named_by_folder_when_file_names_are_equal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    submissions = {"ada": CORRECT, "bob": "def swap():\n    'an example of the lesson'\n"}
    for student, text in submissions.items():  # as nbgrader collects them
        (tmp_path / student).mkdir()
        (tmp_path / student / "09.py").write_text(text)
    files = [str(tmp_path / student / "09.py") for student in submissions]
    reports = ["--reports", str(tmp_path / "reports")]
    assert main(["grade", *files, *reports]) == 1
    one, other, *_ = capsys.readouterr().out.splitlines()
    assert one.endswith("1 of 1 points, report: " + str(tmp_path / "reports/ada-09.py.json"))
    assert "0 of 0 points (it contains no exercise), report: " in other
    found = sorted(path.name for path in (tmp_path / "reports").iterdir())
    assert found == ["ada-09.py.json", "bob-09.py.json"]


def test_invalid_arguments_are_rejected_before_grading(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (file := tmp_path / "ada.py").write_text(CORRECT)
    reports = ["--reports", str(tmp_path / "reports")]
    assert main(["grade", str(file), str(file), *reports]) == 1
    assert "two submissions would write the report ada.py.json" in capsys.readouterr().err
    assert main(["grade", str(file), "--exercises", "ring", *reports]) == 1
    assert "exercise 'ring' does not exist" in capsys.readouterr().err


# -- reading -------------------------------------------------------------------------------------


def submission(path: Path, *cells: str) -> Path:
    nbformat.write(nbformat.v4.new_notebook(cells=[*map(nbformat.v4.new_code_cell, cells)]), path)
    return path


def test_submission_is_read_without_executing_it(tmp_path: Path) -> None:
    cells = [
        "import os, math\nSIZE = 3\nos._exit(1)",
        "def helper(n):\n    return n - 1",
        "%load_ext distkit\ndef mine(ranks, microbatches):\n    return helper(ranks) / SIZE\n\n\n"
        "dk.check.bubble(mine)",
        "def whole_loss(losses rows):",
        "x = " + "-" * 50_000 + "1",
        "(" * 50_000,
        "print('no answer')\nos._exit(1)",
    ]
    found = read(submission(tmp_path / "one.ipynb", *cells))
    assert set(found) == {"bubble", "whole_loss"}
    assert found["bubble"](4, 8) == 1.0 and "cannot be read" in found["whole_loss"]


@pytest.mark.parametrize("lesson", LESSONS)
def test_students_answers_replace_the_stubs_of_a_lesson(lesson: str, tmp_path: Path) -> None:
    path = NOTEBOOKS / f"{lesson}.ipynb"
    cells = nbformat.read(path, as_version=4).cells
    code = [cell.source for cell in cells if cell.cell_type == "code"]
    assert set(read(path)) == set(re.findall(r"dk\.check\.(\w+)\(", "\n".join(code)))  # stubs
    tasks = [TASKS[name] for name in LESSONS[lesson] if name in TASKS]
    mine = [f"def {task.signature}:\n    return 'mine'" for task in tasks]
    found = read(submission(tmp_path / "mine.ipynb", *code, *mine))
    for task in tasks:
        assert found[task.name](*range(task.signature.count(",") + 1)) == "mine"


def test_last_complete_answer_counts(tmp_path: Path) -> None:
    assert all("()" not in task.signature for task in TASKS.values())
    later = "NEXT = ONE + 1\nfirst = run.results[0]"  # defined only when the notebook runs
    shown, broken = "def swap():\n    return 'shown'", "def swap(:\n    pass"
    mine = "def swap(x, y):\n    return 'mine'"
    other = "def better(x, y):\n    return swap(x, y) + ' and more'"
    assert not read(submission(tmp_path / "a.ipynb", shown, shown.replace("swap()", "swap( )")))
    found = read(submission(tmp_path / "b.ipynb", mine, shown))
    assert list(found) == ["swap"] and found["swap"](1, 2) == "mine"
    found = read(submission(tmp_path / "c.ipynb", mine, other, "dk.check.swap(better)"))
    assert found["swap"](1, 2) == "mine and more"
    answer = "ONE = 1\ndef swap(x, y):\n    return NEXT if x else first"
    swap = read(submission(tmp_path / "h.ipynb", "ONE = 1", later, answer))["swap"]
    assert swap(1, 2) == 2
    with pytest.raises(NameError, match="'first' is not defined"):
        swap(0, 2)
    # an example that the student submits explicitly
    found = read(submission(tmp_path / "d.ipynb", shown, "dk.check.swap(swap)"))
    assert found["swap"]() == "shown"
    assert "cannot be read" in read(submission(tmp_path / "e.ipynb", mine, broken))["swap"]
    assert not read(submission(tmp_path / "f.ipynb", "def swap() -> None\n    pass"))
    assert not read(submission(tmp_path / "g.ipynb", 'text = """\ndef swap(x, y): ...\n"""'))


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("one.ipynb", b"null", "not a notebook"),
        ("one.ipynb", b'{"cells": [3]}', "subscriptable"),
        ("one.ipynb", b"# text", "Expecting value"),
        ("one.ipynb", b'{"a":' * 100_000, "recursion"),
        ("one.py", "def f(): 'é'".encode("latin-1"), "utf-8"),
        ("one.py", b"#" * (1 << 26) + b"#", "larger than 64 MiB"),
        ("one.py", None, "not a file"),
    ],
)
def test_unreadable_file_raises_with_the_reason(
    name: str, content: bytes | None, reason: str, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DistkitError, match=f"^{name} cannot be read: .*{reason}"):
        read(tmp_path / name)


# -- nbgrader ----------------------------------------------------------------------------------


def test_assignments_have_valid_nbgrader_metadata(tmp_path: Path) -> None:
    files = assignments.write(tmp_path)
    assert [file.stem for file in files] == list(LESSONS)
    seen = set()
    for file in files:
        notebook = nbformat.read(file, as_version=4)
        nbformat.validate(notebook)
        for cell in notebook.cells:
            metadata = cell.metadata.nbgrader
            assert metadata.schema_version == 3 and ("points" in metadata) == metadata.grade
            assert ("### BEGIN SOLUTION" in cell.source) == metadata.solution
            seen.add(metadata.grade_id)
            task = TASKS.get(metadata.grade_id.removeprefix("check-"))
            assert not (task and metadata.grade) or metadata.points == task.worth
    assert seen >= {*TASKS, *QUESTIONS}
    with pytest.raises(DistkitError, match="already exists"):
        assignments.write(tmp_path, ["02"])
    with pytest.raises(DistkitError, match="no lesson starts with '99'"):
        assignments.write(tmp_path / "other", ["99"])
    (one,) = assignments.write(tmp_path / "one", ["01", "02"], ["chunk_sent"])
    cells = nbformat.read(one, as_version=4).cells
    assert one.stem == "02_all_reduce" and len(cells) == 4
    with pytest.raises(DistkitError, match=r"no exercise 'swap'\. Available: chunk_sent, "):
        assignments.write(tmp_path / "two", ["02"], ["swap"])


LESSON = "06_cost_models"
#: Each student's answer to the first exercise ("" if correct), and points for both exercises.
STUDENTS = {
    "correct": ("", 2),
    "hostile": ("import os\n    os._exit(0)", 1),
}


def nbgrader(folder: Path, *command: str) -> str:
    jupyter_folders = isolated_environment(folder / "jupyter")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # nbgrader calls alembic
    completed = subprocess.run(
        [sys.executable, "-m", "nbgrader", *command],
        cwd=folder,
        env={**os.environ, **jupyter_folders, "PATH": path},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
    return completed.stdout + completed.stderr


def submit(folder: Path, student: str, body: str) -> None:
    """Submit correct answers, except to the first exercise if ``body`` is not empty."""
    released = nbformat.read(folder / "release" / LESSON / f"{LESSON}.ipynb", as_version=4)
    for cell in released.cells:
        name = cell.metadata.nbgrader.grade_id
        if name in TASKS:
            assert "raise NotImplementedError()" in cell.source and "math" not in cell.source
            task = TASKS[name]
            cell.source = solved(task)
            if body and name == "broadcast_seconds":
                cell.source = f"def {task.signature}:\n    {body}"
    file = folder / "submitted" / student / LESSON / f"{LESSON}.ipynb"
    file.parent.mkdir(parents=True)
    nbformat.write(released, file)


@pytest.mark.timeout(900)
def test_nbgrader_grades_correct_and_hostile_submissions(tmp_path: Path) -> None:
    (tmp_path / "nbgrader_config.py").write_text(
        "c = get_config()\nc.CourseDirectory.course_id = 'course'\nc.Execute.timeout = 240\n"
    )
    assignments.write(tmp_path, ["06"])
    nbgrader(tmp_path, "generate_assignment", LESSON, "--create")
    for student, (body, _) in STUDENTS.items():
        submit(tmp_path, student, body)
    nbgrader(tmp_path, "autograde", LESSON, "--create")
    nbgrader(tmp_path, "export", "--to", "grades.csv")
    with (tmp_path / "grades.csv").open() as table:
        scores = {row["student_id"]: float(row["score"]) for row in csv.DictReader(table)}
    assert scores == {student: points for student, (_, points) in STUDENTS.items()}
