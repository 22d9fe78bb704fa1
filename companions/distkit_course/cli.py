"""The commands ``distkit grade``, ``assignments`` and ``answers``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add(commands: Any) -> None:
    """Add the commands to the parser of ``distkit``."""
    grade = commands.add_parser(
        "grade",
        help="grade submissions of the exercises",
        description="Grade submissions. Exit status 0: all pass; 1: some fail, or a submission "
        "has no exercise; 2: some are blocked because the machine is busy, and all others pass.",
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
        help="folder of the reports, one JSON file per submission (default: reports)",
    )
    exercises = "exercises, separated by commas (default: the exercises of each submission)"
    grade.add_argument("--exercises", default="", metavar="NAMES", help=exercises)
    grade.set_defaults(run=_grade)
    export = commands.add_parser("assignments", help="write nbgrader assignments of the exercises")
    export.add_argument("folder", type=Path, metavar="DIR", help="the root of an nbgrader course")
    exercises = "exercises, separated by commas (default: all of the lessons)"
    export.add_argument("--exercises", default="", metavar="NAMES", help=exercises)
    export.set_defaults(run=_assignments)
    answers = commands.add_parser(
        "answers", help="print the answers of the concept checks, for teachers"
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
    from distkit.cli import write
    from distkit_course.grading import grade

    names = [name for name in args.exercises.split(",") if name]
    write(args.reports, lambda: args.reports.mkdir(parents=True, exist_ok=True))
    codes = set()
    for submission, report in zip(
        args.submissions, grade(args.submissions, args.reports, names), strict=True
    ):
        codes.add(report.exit_code)
        note = "" if report.criteria else " (it contains no exercise)"
        file = args.reports / f"{report.submission}.json"
        print(f"{submission}: {report.points} of {report.max} points{note}, {file}")
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
