"""The commands ``distkit lab``, ``grade``, ``assignments`` and ``answers``."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from distkit import cli
from distkit.errors import DistkitError

#: Runs jupyterlab as a module without importing modules from the current folder.
JUPYTERLAB = "import sys; del sys.path[0]; from jupyterlab.labapp import main; sys.exit(main())"


def add(commands: Any) -> None:
    """Add the commands to the parser of ``distkit``."""
    usage = "distkit lab [NOTEBOOK] [OPTION ...]"
    lab = commands.add_parser("lab", help="open the notebooks in JupyterLab", usage=usage)
    lab.add_argument(
        "notebook",
        nargs="?",
        type=Path,
        metavar="NOTEBOOK",
        help="a notebook or folder (default: the welcome notebook); other options go to JupyterLab",
    )
    lab.set_defaults(run=_lab)
    grade = commands.add_parser(
        "grade",
        help="grade submitted exercises",
        description="Grade submissions. Exit status 0: all exercises pass; 1: some fail, or a "
        "submission has no exercise or cannot be read; 2: some are blocked because the machine is "
        "busy, and all others pass.",
    )
    grade.add_argument(
        "submissions",
        type=Path,
        nargs="+",
        metavar="SUBMISSION",
        help="a notebook or a Python file with functions named after the exercises",
    )
    grade.add_argument(
        "--reports",
        type=Path,
        default=Path("reports"),
        metavar="DIR",
        help="folder for the reports, one JSON file per submission (default: reports)",
    )
    exercises = "comma-separated exercises (default: the exercises in each submission)"
    grade.add_argument("--exercises", default="", metavar="NAMES", help=exercises)
    grade.set_defaults(run=_grade)
    export = commands.add_parser("assignments", help="write nbgrader assignments for the exercises")
    export.add_argument("folder", type=Path, metavar="DIR", help="the root of an nbgrader course")
    exercises = "comma-separated exercises (default: all in the selected lessons)"
    export.add_argument("--exercises", default="", metavar="NAMES", help=exercises)
    export.set_defaults(run=_assignments)
    answers = commands.add_parser(
        "answers", help="print the answers to the concept checks, for instructors"
    )
    answers.set_defaults(run=_answers)
    for command in (export, answers):
        command.add_argument(
            "lessons",
            nargs="*",
            metavar="LESSON",
            help="prefixes of lesson names, such as 02 (default: all)",
        )


def _grade(args: argparse.Namespace, remaining: list[str]) -> int:
    from distkit_course.grading import grade

    names = [name for name in args.exercises.split(",") if name]
    args.reports.mkdir(parents=True, exist_ok=True)
    codes = set()
    for submission, report in zip(
        args.submissions, grade(args.submissions, args.reports, names), strict=True
    ):
        codes.add(report.exit_code)
        note = "" if report.criteria else " (it contains no exercise)"
        file = args.reports / f"{report.submission}.json"
        print(f"{submission}: {report.points} of {report.max} points{note}, report: {file}")
    return 1 if 1 in codes else max(codes)


def _assignments(args: argparse.Namespace, remaining: list[str]) -> None:
    from distkit_course import assignments

    names = [name for name in args.exercises.split(",") if name]
    for file in assignments.write(args.folder, args.lessons, names):
        print(file)


def _answers(args: argparse.Namespace, remaining: list[str]) -> None:
    from distkit_course.questions import lessons
    from distkit_course.quizzes import QUIZZES

    quizzes = [QUIZZES[lesson] for lesson in lessons(args.lessons) if lesson in QUIZZES]
    print("\n\n".join(quiz.answers for quiz in quizzes))


def _lab(args: argparse.Namespace, remaining: list[str]) -> None:
    from importlib.util import find_spec

    if find_spec("jupyterlab") is None:
        raise DistkitError("JupyterLab is not installed. Run: pip install jupyterlab")
    target = args.notebook or _welcome()
    if args.notebook is None:  # the notebooks link to distkit's sources
        remaining = [f"--ServerApp.root_dir={cli.CHECKOUT}", *remaining]
    if not target.exists():
        raise DistkitError(f"{target}: notebook or folder not found.")
    # root is the usual user in containers
    if os.geteuid() == 0 and "--allow-root" not in remaining:
        remaining = [*remaining, "--allow-root"]
    # disables JupyterLab's prompt about news, which would cover the notebook
    paths = [str(Path(cli.__file__).parent / "jupyter"), os.environ.get("JUPYTER_CONFIG_PATH")]
    os.environ["JUPYTER_CONFIG_PATH"] = os.pathsep.join(filter(None, paths))
    os.execv(sys.executable, [sys.executable, "-c", JUPYTERLAB, str(target), *remaining])


def _welcome() -> Path:
    """Copy missing notebooks from the checkout; return the copy of the first notebook."""
    if cli.CHECKOUT.joinpath("notebooks").is_dir():
        folder = cli.CHECKOUT / "my-notebooks"  # git ignores it
        folder.mkdir(exist_ok=True)
        for original in cli.CHECKOUT.glob("notebooks/*.ipynb"):
            if not (folder / original.name).exists():
                shutil.copyfile(original, folder / original.name)
        return folder / "00_welcome.ipynb"
    raise DistkitError(
        "the notebooks are not installed with distkit: get the `notebooks` folder from your "
        "instructor or the project's repository, then run: distkit lab notebooks"
    )
