"""Grading: what one answer does costs no other; nbgrader grades what is made of the exercises."""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import psutil
import pytest
from waiting import alive, until

from benchmarks.course.classroom import HOSTILE, harmful
from benchmarks.lab import surroundings
from distkit.cli import main
from distkit.errors import DistkitError
from distkit.exercises import LESSONS, QUESTIONS, TASKS, assignments, trials
from distkit.exercises.assignments import solved
from distkit.exercises.confinement import landlock
from distkit.exercises.grading import grade, progress, read

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
RIGHT = "def bubble(ranks, microbatches):\n    return (ranks - 1) / (microbatches + ranks - 1)\n"


def processes() -> set[int]:
    below = psutil.Process().children(recursive=True)
    return {p.pid for p in below if alive(p)}


def grades(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_answer_costs_no_other_and_leaves_nobody(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trials, "SECONDS", 15)
    file, report, others = tmp_path / "one.py", tmp_path / "one.json", tmp_path / "gradebook.db"
    others.write_text("everybody's")
    file.write_text(f"{harmful(TASKS['swap'], kind, others)}\n\n{RIGHT}")
    grade(file, report, ["bubble"])  # what is kept warm runs from now on
    before = processes()
    code = grade(file, report).exit_code
    rows = grades(report)["criteria"]
    assert [(row["criterion"], row["status"], row["points"]) for row in rows] == [
        ("swap.values", "fail", 0),
        ("bubble.values", "pass", 1),
    ]
    assert (grades(report)["max"], code) == (4, 1)
    version = landlock() if sys.platform == "linux" else 0
    if version >= 1:
        assert others.read_text() == "everybody's"
    if version >= 6:  # the zygote is protected from signals
        until(lambda: processes() <= before)
    until(lambda: len(processes()) <= len(before))


def test_a_report_tells_each_criterion_and_keeps_the_trace(tmp_path: Path) -> None:
    wrong = solved(TASKS["swap"]).replace("return swap(x, y)", "swap(x, y); return swap(x, y)")
    (tmp_path / "one.py").write_text(f"{wrong}\n\n{RIGHT}")
    report = grade(tmp_path / "one.py", tmp_path / "one.json", ["swap", "bubble", "relay"])
    rows = grades(tmp_path / "one.json")["criteria"]
    assert [(r["criterion"], r["status"], r["points"], r["max"]) for r in rows] == [
        ("swap.values", "pass", 1, 1),
        ("swap.messages", "wasteful", 0, 1),
        ("swap.calls", "pass", 1, 1),
        ("bubble.values", "pass", 1, 1),
        ("relay.attempt", "not attempted", 0, 2),
    ]
    assert rows[1]["message"].startswith("2 messages sent by the busiest rank; 1 suffice")
    assert tmp_path.joinpath(rows[1]["evidence"]).exists() and report.exit_code == 1
    assert report.criteria == rows
    page = (tmp_path / "one.html").read_text()
    assert "<h1>one: 3 of 6 points</h1>" in page
    assert [page.count(word) for word in ("swap: wasteful", "bubble: pass", "relay: not")] == [
        1
    ] * 3
    assert "2 messages sent by the busiest rank" in page
    assert page.count("<figure><svg ") == 1  # the run that was wasteful


def test_the_report_is_written_before_the_check_has_ended(tmp_path: Path) -> None:
    program = (
        "import os; from distkit.exercises import grading, trials\n"
        "trials.tried = lambda *a: os._exit(3)\n"
        "from pathlib import Path; grading.grade(Path('one.py'), Path('one.json'))"
    )
    (tmp_path / "one.py").write_text(RIGHT)
    assert subprocess.run([sys.executable, "-c", program], cwd=tmp_path).returncode == 3
    (row,) = grades(tmp_path / "one.json")["criteria"]
    assert (row["status"], row["max"], row["message"]) == ("fail", 1, "the check did not end")


def submission(path: Path, *cells: str) -> Path:
    nbformat.write(nbformat.v4.new_notebook(cells=[*map(nbformat.v4.new_code_cell, cells)]), path)
    return path


def test_a_submission_is_read_not_run(tmp_path: Path) -> None:
    cells = [
        "import os, math\nSIZE = 3\nos._exit(1)",
        "def helper(n):\n    return n - 1",
        "%load_ext distkit\ndef mine(ranks, microbatches):\n    return helper(ranks) / SIZE\n\n\n"
        "dk.check.bubble(mine)",
        "def whole_loss(losses rows):",
        "print('no answer')\nos._exit(1)",
    ]
    found = read(submission(tmp_path / "one.ipynb", *cells))
    assert set(found) == {"bubble", "whole_loss"}
    assert found["bubble"](4, 8) == 1.0 and "cannot be read" in found["whole_loss"]
    with pytest.raises(DistkitError, match="is no submission that can be read"):
        read(tmp_path / "none.ipynb")


@pytest.mark.parametrize("lesson", LESSONS)
def test_what_a_lesson_itself_defines_is_no_answer(lesson: str) -> None:
    path = NOTEBOOKS / f"{lesson}.ipynb"
    cells = nbformat.read(path, as_version=4).cells
    code = "\n".join(cell.source for cell in cells if cell.cell_type == "code")
    assert set(read(path)) == set(re.findall(r"dk\.check\.(\w+)\(", code))  # the stubs


@pytest.mark.parametrize("lesson", LESSONS)
def test_an_answer_in_a_lesson_needs_none_of_the_lessons_runs(lesson: str, tmp_path: Path) -> None:
    tasks = [TASKS[name] for name in LESSONS[lesson] if name in TASKS]
    cells = nbformat.read(NOTEBOOKS / f"{lesson}.ipynb", as_version=4).cells
    code = [cell.source for cell in cells if cell.cell_type == "code"]
    mine = [f"def {task.signature}:\n    return 'mine'" for task in tasks]
    found = read(submission(tmp_path / "mine.ipynb", *code, *mine))
    for task in tasks:
        assert found[task.name](*range(task.signature.count(",") + 1)) == "mine"


def test_the_answer_is_the_last_that_a_student_wrote_as_one(tmp_path: Path) -> None:
    assert all("()" not in task.signature for task in TASKS.values())
    later = "NEXT = ONE + 1\nfirst = run.results[0]"  # which only a run of the notebook has
    shown, broken = "def swap():\n    return 'shown'", "def swap(:\n    pass"
    mine = "def swap(x, y):\n    return 'mine'"
    other = "def better(x, y):\n    return swap(x, y) + ' and more'"
    assert not read(submission(tmp_path / "a.ipynb", shown, shown.replace("swap()", "swap( )")))
    found = read(submission(tmp_path / "b.ipynb", mine, shown))
    assert list(found) == ["swap"] and found["swap"](1, 2) == "mine"
    found = read(submission(tmp_path / "c.ipynb", mine, other, "dk.check.swap(better)"))
    assert found["swap"](1, 2) == "mine and more"
    needs = "ONE = 1\ndef swap(x, y):\n    return NEXT if x else first"
    swap = read(submission(tmp_path / "h.ipynb", "ONE = 1", later, needs))["swap"]
    assert swap(1, 2) == 2
    with pytest.raises(NameError, match="'first' is not defined"):
        swap(0, 2)
    found = read(submission(tmp_path / "d.ipynb", shown, "dk.check.swap(swap)"))  # asked for it
    assert found["swap"]() == "shown"
    assert "cannot be read" in read(submission(tmp_path / "e.ipynb", mine, broken))["swap"]
    assert not read(submission(tmp_path / "f.ipynb", "def swap() -> None\n    pass"))
    assert not read(submission(tmp_path / "g.ipynb", 'text = """\ndef swap(x, y): ...\n"""'))


def test_the_command_grades_and_tells_a_classs_progress(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ada.py").write_text(RIGHT)
    (tmp_path / "bob.py").write_text(RIGHT.replace("- 1)", ")") + solved(TASKS["best_order"]))
    reports = ["--reports", str(tmp_path / "reports")]
    assert main(["grade", str(tmp_path / "ada.py"), *reports]) == 0
    assert main(["grade", str(tmp_path / "bob.py"), *reports]) == 1
    capsys.readouterr()
    files = [str(tmp_path / "reports" / f"{name}.json") for name in ("ada", "bob")]
    assert main(["progress", *files]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "submission,points,max,bubble,best_order",
        "ada,1,2,1,",
        "bob,1,2,0,1",
    ]
    (tmp_path / "eve.py").write_text("def swap():\n    'is what a lesson shows'\n")
    assert main(["grade", str(tmp_path / "eve.py"), *reports]) == 1
    assert "0 of 0 points (there is no exercise in it), " in capsys.readouterr().out
    assert main(["progress", *files, str(tmp_path / "reports/eve.json")]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "eve,0,2,,"
    with pytest.raises(DistkitError, match="is no report of distkit grade"):
        progress([tmp_path / "ada.py"])
    for student in "ada", "bob":  # as nbgrader collects them: all by one name
        (tmp_path / student).mkdir()
        (tmp_path / f"{student}.py").rename(tmp_path / student / "09.py")
    same = [str(tmp_path / student / "09.py") for student in ("ada", "bob")]
    assert main(["grade", *same, "--reports", str(tmp_path / "same")]) == 1
    reports = sorted(path.name for path in (tmp_path / "same").glob("*.json"))
    assert reports == ["ada-09.py.json", "bob-09.py.json"]
    assert main(["grade", same[0], "--exercises", "ring"]) == 1
    assert "there is no exercise 'ring'" in capsys.readouterr().err


def test_all_rows_of_a_class_have_one_total_but_what_was_blocked(tmp_path: Path) -> None:
    rows = {
        "ada": [("swap.values", 1, 1), ("swap.calls", 1, 1), ("overlap.time", 0, 0)],
        "bob": [("swap.values", 0, 2)],
        "eve": [],
        "joe": [("swap.values", 1, 1), ("swap.calls", 0, 0)],
    }
    for name, of in rows.items():
        criteria = [{"criterion": c, "points": points, "max": most} for c, points, most in of]
        total = {k: sum(c[k] for c in criteria) for k in ("points", "max")}
        report = {"submission": name, **total, "criteria": criteria}
        (tmp_path / f"{name}.json").write_text(json.dumps(report))
    assert progress(tmp_path.glob("*.json")).splitlines() == [
        "submission,points,max,swap,overlap",
        "ada,2,2,2,0",
        "bob,0,2,0,",
        "eve,0,2,,",
        "joe,1,1,1,",
    ]


# -- nbgrader ----------------------------------------------------------------------------------


def test_assignments_have_the_metadata_of_nbgrader(tmp_path: Path) -> None:
    files = assignments.write(tmp_path)
    assert [file.stem for file in files] == list(LESSONS)
    seen = set()
    for file in files:
        notebook = nbformat.read(file, as_version=4)
        nbformat.validate(notebook)
        for cell in notebook.cells:
            told = cell.metadata.nbgrader
            assert told.schema_version == 3 and ("points" in told) == told.grade
            assert ("### BEGIN SOLUTION" in cell.source) == told.solution
            seen.add(told.grade_id)
            task = TASKS.get(told.grade_id.removeprefix("check-"))
            assert not (task and told.grade) or told.points == task.worth
    assert seen >= {*TASKS, *QUESTIONS}
    with pytest.raises(DistkitError, match="is there already"):
        assignments.write(tmp_path, ["02"])
    with pytest.raises(DistkitError, match="there is no lesson '99'"):
        assignments.write(tmp_path / "other", ["99"])


LESSON = "06_cost_models"
#: The bodies that students write for the first exercise, and the points of it and of the second.
STUDENTS = {
    "right": ("", 2),
    "wrong": ("return 2 * n * link.alpha", 1),
    "hostile": ("import os\n    os._exit(0)", 1),
    "endless": ("while True: pass", 1),
}


def nbgrader(folder: Path, *command: str) -> str:
    places = surroundings(folder / "jupyter")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # it calls alembic
    ran = subprocess.run(
        [sys.executable, "-m", "nbgrader", *command],
        cwd=folder,
        env={**os.environ, **places, "PATH": path},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout + ran.stderr


def submit(folder: Path, student: str, body: str) -> None:
    """The released notebook, with the first exercise as this student has it."""
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
def test_nbgrader_grades_right_wrong_and_hostile_submissions(tmp_path: Path) -> None:
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
