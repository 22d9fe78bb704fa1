"""Grading of submissions, each in a separate judge process; this process writes the reports.

A judge sends plain values. Its report is written after the judge and all processes of the
submission have ended. At the end, all reports are written again from memory, so that no submission
can change another's report.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distkit import imports
from distkit.cluster.processes.channel import Channel
from distkit.cluster.processes.cleanup import (
    END_TIMEOUT,
    adopt_orphans,
    children,
    kill_children,
)
from distkit.errors import DistkitError
from distkit_course.exercises import TASKS
from distkit_course.judging import row
from distkit_course.task import BLOCKED, FAIL, PASS

#: The function that a judge process runs, and its argument.
_JUDGE = "distkit.cluster.processes.fork_client:call_during_start", "distkit_course.judging:main"

#: Time to wait for a message from a judge before it is considered hung and killed [s].
TIMEOUT = 300.0


@dataclass
class Report:
    """The report on a submission.

    Args:
        submission: the submission's name.
        criteria: the rows, with criteria and points.
        evidence: traces of criteria that did not pass, by file name.
    """

    submission: str
    criteria: list[dict[str, Any]] = field(default_factory=list)
    evidence: dict[str, bytes] = field(default_factory=dict)

    @property
    def points(self) -> int:
        """The number of points that the submission earned."""
        return sum(row["points"] for row in self.criteria)

    @property
    def max(self) -> int:
        """The maximum number of points."""
        return sum(row["max"] for row in self.criteria)

    @property
    def exit_code(self) -> int:
        """0 if all pass; 1 if some fail or none exist; 2 if some are blocked and none fail."""
        statuses = {row["status"] for row in self.criteria} - {PASS}
        return 1 if statuses - {BLOCKED} or not self.criteria else 2 if statuses else 0

    def files(self) -> dict[str, bytes]:
        """Return the report and its evidence, by file name."""
        report = {
            "submission": self.submission,
            "points": self.points,
            "max": self.max,
            "criteria": self.criteria,
        }
        text = json.dumps(report, indent=2, ensure_ascii=False)
        return {f"{self.submission}.json": text.encode(errors="replace"), **self.evidence}

    def add(self, criterion: dict[str, Any], trace: bytes = b"") -> None:
        """Add a row and its trace."""
        file = f"{self.submission}/{criterion['criterion']}.gz"
        self.criteria.append({**criterion, "evidence": file if trace else None})
        if trace:
            self.evidence[file] = trace

    def add_failed(self, name: str, message: str) -> None:
        """Add a failed exercise without a verdict."""
        self.add(row(f"{name}.end", FAIL, TASKS[name].worth, message))


def titles(submissions: Sequence[Path]) -> list[str]:
    """Return the name of each submission: its file's stem, or its path if the stems are not unique.

    Raises:
        DistkitError: two submissions would have the same name.

    >>> titles([Path("in/ada.py"), Path("in/bob.ipynb")])
    ['ada', 'bob']
    >>> titles([Path("in/ada/02.ipynb"), Path("in/bob/02.ipynb")])
    ['ada-02.ipynb', 'bob-02.ipynb']
    """
    names = [path.stem for path in submissions]
    if len({*names}) < len(names):
        files = [path.resolve() for path in submissions]
        parent = os.path.commonpath([path.parent for path in files])
        names = ["-".join(path.relative_to(parent).parts) for path in files]
    if duplicate := next((name for name in names if names.count(name) > 1), ""):
        raise DistkitError(f"two submissions would write the report {duplicate}.json. Rename one.")
    return names


def grade(submissions: Sequence[Path], folder: Path, names: Sequence[str] = ()) -> Iterator[Report]:
    """Judge submissions one after the other and yield the report of each.

    Args:
        submissions: notebooks or Python files.
        folder: the folder for the reports.
        names: names of exercises; if empty, the exercises of each submission.

    Raises:
        DistkitError: an exercise is unknown, or two submissions have the same name.
    """
    if unknown := [name for name in names if name not in TASKS]:
        raise DistkitError(
            f"exercise {unknown[0]!r} does not exist. Available: {', '.join(TASKS)}."
        )
    all_files, folder = dict[Path, bytes](), folder.resolve()
    paths = [path.resolve() for path in submissions]  # a submission may remove the current folder
    for path, title in zip(paths, titles(submissions), strict=True):
        report = Report(title)
        _judge(path, report, names)
        files = {folder / name: content for name, content in report.files().items()}
        all_files |= files
        with suppress(OSError):  # for example a full disk; retried at the end
            _write(files)
        yield report
    _write(all_files)


def _judge(submission: Path, report: Report, names: Sequence[str]) -> None:
    """Judge a submission; if a judge dies, start another judge for the remaining exercises."""
    pending = [*names]
    while True:
        current, read_error = "", "the judge exited while reading the submission"
        for kind, content in _judge_messages(submission, pending):
            match kind:
                case "unreadable":
                    read_error = content
                case "answers":
                    read_error, pending = "", [*content]
                case "exercise":
                    current = content
                    pending.remove(current)
                case "judged":
                    current = ""
                    for row_args in content:
                        report.add(*row_args)
        if current:
            report.add_failed(current, "the check did not finish")
        if read_error or not (current and pending):
            break
    if read_error:
        report.add(row("submission.reading", FAIL, 0, read_error))
    for name in pending:
        report.add_failed(name, "it was not judged")


def _judge_messages(submission: Path, names: Sequence[str]) -> Iterator[Any]:
    """Start a judge, yield its messages, and terminate all processes that it started."""
    adopt_orphans()
    parent_end, judge_end = socket.socketpair()
    parent_end.settimeout(TIMEOUT)
    channel, previous_children = Channel(parent_end), children()
    with judge_end:
        process = subprocess.Popen(
            imports.python_command(*_JUDGE, judge_end.fileno(), submission, *names),
            pass_fds=[judge_end.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C must not reach it
        )
    try:
        with suppress(EOFError):
            while True:
                yield channel.recv()
    finally:
        channel.close()
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_TIMEOUT)
        process.kill()
        process.wait()
        _end_orphans(exclude=previous_children)
        adopt_orphans(False)


def _end_orphans(exclude: Container[int]) -> None:
    """Wait until all children except ``exclude`` have ended; kill them after a timeout."""
    end = time.monotonic() + END_TIMEOUT
    while remaining := [pid for pid in children() if pid not in exclude]:
        if time.monotonic() > end:
            kill_children(exclude)
        for pid in remaining:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.005)


# -- files -----------------------------------------------------------------------------------


def _write(files: Mapping[Path, bytes]) -> None:
    """Write files, and replace links and folders at their paths."""
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
