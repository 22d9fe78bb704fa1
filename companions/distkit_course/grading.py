"""Grades a class: each submission has its own judge process; this process writes the reports.

A judge sends plain values. The report is written after the judge, and all that the submission has
started, has ended. Reports stay in memory until the last submission is graded, when all are written
again: no submission changes another's.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distkit.cluster.processes import boot
from distkit.cluster.processes.channel import Channel
from distkit.cluster.processes.descendants import (
    PATIENCE,
    adopt_orphans,
    children,
    end_orphans,
)
from distkit.errors import DistkitError
from distkit_course.exercises import TASKS
from distkit_course.judging import row
from distkit_course.task import BLOCKED, FAIL, PASS

#: The functions that a judge's process runs.
_JUDGE = "distkit.cluster.processes.forkserver:call_beside", "distkit_course.judging:main"

#: A judge that says nothing for longer than this has hung, and is killed [s].
SILENT = 300.0


@dataclass
class Report:
    """The report on a submission.

    Args:
        submission: its name.
        criteria: what was looked at, and the points for it.
        evidence: traces of what is not right, by the names of their files.
    """

    submission: str
    criteria: list[dict[str, Any]] = field(default_factory=list)
    evidence: dict[str, bytes] = field(default_factory=dict)

    @property
    def points(self) -> int:
        """The points that it gets."""
        return sum(row["points"] for row in self.criteria)

    @property
    def max(self) -> int:
        """The points that it can get."""
        return sum(row["max"] for row in self.criteria)

    @property
    def exit_code(self) -> int:
        """0: all pass; 1: some do not, or there is none; 2: some are blocked, all others pass."""
        seen = {row["status"] for row in self.criteria} - {PASS}
        return 1 if seen - {BLOCKED} or not self.criteria else 2 if seen else 0

    def files(self) -> dict[str, bytes]:
        """The report and its evidence, by the names of their files."""
        whole = {
            "submission": self.submission,
            "points": self.points,
            "max": self.max,
            "criteria": self.criteria,
        }
        text = json.dumps(whole, indent=2, ensure_ascii=False)
        return {f"{self.submission}.json": text.encode(errors="replace"), **self.evidence}

    def add(self, seen: dict[str, Any], trace: bytes = b"") -> None:
        """Add a row, and the trace that belongs to it."""
        file = f"{self.submission}/{seen['criterion']}.gz"
        self.criteria.append({**seen, "evidence": file if trace else None})
        if trace:
            self.evidence[file] = trace

    def add_failed(self, name: str, why: str) -> None:
        """Add an exercise without a verdict."""
        self.add(row(f"{name}.end", FAIL, TASKS[name].worth, why))


def titles(submissions: Sequence[Path]) -> list[str]:
    """A name for each submission: its file's, or its path's where two files have the same.

    Raises:
        DistkitError: two have the same name all the same.

    >>> titles([Path("in/ada.py"), Path("in/bob.ipynb")])
    ['ada', 'bob']
    >>> titles([Path("in/ada/02.ipynb"), Path("in/bob/02.ipynb")])
    ['ada-02.ipynb', 'bob-02.ipynb']
    """
    names = [path.stem for path in submissions]
    if len({*names}) < len(names):
        files = [path.resolve() for path in submissions]
        above = os.path.commonpath([path.parent for path in files])
        names = ["-".join(path.relative_to(above).parts) for path in files]
    if twice := next((name for name in names if names.count(name) > 1), ""):
        raise DistkitError(f"two submissions would have the report {twice}.json. Rename one.")
    return names


def grade(submissions: Sequence[Path], folder: Path, names: Sequence[str] = ()) -> Iterator[Report]:
    """Judge submissions one after the other; what one does costs no other.

    Args:
        submissions: notebooks or Python files.
        folder: where the reports go.
        names: of the exercises; those in each submission if there are none.

    Raises:
        DistkitError: there is no such exercise, or two submissions have the same name.
    """
    if unknown := [name for name in names if name not in TASKS]:
        raise DistkitError(f"there is no exercise {unknown[0]!r}. There are: {', '.join(TASKS)}.")
    written, folder = dict[Path, bytes](), folder.resolve()
    paths = [path.resolve() for path in submissions]  # a submission may remove the current folder
    for path, title in zip(paths, titles(submissions), strict=True):
        report = Report(title)
        _judge(path, report, names)
        files = {folder / name: content for name, content in report.files().items()}
        written |= files
        with suppress(OSError):  # a full disk, say: it is tried again
            _write(files)
        yield report
    _write(written)


def _judge(submission: Path, report: Report, names: Sequence[str]) -> None:
    """Judge a submission; where a judge ends in an exercise, another goes on with the next."""
    left = [*names]
    while True:
        begun, unread = "", "its judge ended while reading it"
        for kind, what in _heard(submission, left):
            match kind:
                case "unreadable":
                    unread = what
                case "answers":
                    unread, left = "", [*what]
                case "exercise":
                    begun = what
                    left.remove(begun)
                case "judged":
                    begun = ""
                    for seen in what:
                        report.add(*seen)
        if begun:
            report.add_failed(begun, "the check did not end")
        if unread or not (begun and left):
            break
    if unread:
        report.add(row("submission.reading", FAIL, 0, unread))
    for name in left:
        report.add_failed(name, "it was not judged")


def _heard(submission: Path, names: Sequence[str]) -> Iterator[Any]:
    """Start a judge, yield its messages, and end everything that it has started."""
    adopt_orphans()
    ours, theirs = socket.socketpair()
    ours.settimeout(SILENT)
    line, before = Channel(ours), children()
    with theirs:
        process = subprocess.Popen(
            boot.command(*_JUDGE, theirs.fileno(), submission, *names),
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is not meant for it
        )
    try:
        with suppress(EOFError):
            while True:
                yield line.recv()
    finally:
        line.close()
        with suppress(subprocess.TimeoutExpired):
            process.wait(PATIENCE)
        process.kill()
        process.wait()
        end_orphans(exclude=before)
        adopt_orphans(False)


# -- files -----------------------------------------------------------------------------------


def _write(files: Mapping[Path, bytes]) -> None:
    """Write files, whatever is in their place."""
    for file, content in files.items():
        folder = file.parent
        if folder.is_symlink() or not folder.is_dir():
            folder.unlink(missing_ok=True)
            folder.mkdir(parents=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            folder.chmod(0o755)
        if file.is_dir() and not file.is_symlink():
            shutil.rmtree(file)
        file.unlink(missing_ok=True)
        file.write_bytes(content)
