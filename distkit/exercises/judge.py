"""The judge of one submission: a process that reads and judges it, and ends.

What the submission defines runs on ranks, which send plain values to this process. What it says
of each criterion goes to the process that writes the reports.
"""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from distkit.cluster.processes.channel import Channel
from distkit.cluster.processes.descendants import die_with_parent
from distkit.errors import DistkitError
from distkit.exercises import TASKS
from distkit.exercises.confinement import JUDGE, limit_memory
from distkit.exercises.submissions import Written, read
from distkit.exercises.task import FAIL, NOT_ATTEMPTED, PASS, Criterion, Task

#: A longer text of a criterion is cut [characters]; the traces of all are kept up to here [bytes].
LONGEST, EVIDENCE = 20_000, 1 << 25


def main(line: str, submission: str, *names: str) -> None:
    """Judge a submission.

    Args:
        line: the file descriptor of the channel to who writes the reports.
        submission: the path of the file.
        names: of the exercises; those in the submission if there are none.
    """
    die_with_parent()
    channel = Channel(socket.socket(fileno=int(line)))
    limit_memory(JUDGE)
    _Judge(channel.send).judge(Path(submission), names)


class _Judge:
    """Judges the exercises of a submission one after the other."""

    def __init__(self, tell: Callable[[tuple[Any, ...]], None]) -> None:
        self._tell, self._room = tell, EVIDENCE

    def judge(self, submission: Path, names: tuple[str, ...]) -> None:
        try:
            answers = read(submission)
        except DistkitError as error:
            self._tell(("unreadable", str(error)[:LONGEST]))
            return
        chosen = names or tuple(answers)
        self._tell(("answers", chosen))
        for name in chosen:
            self._tell(("exercise", name))
            self._tell(("verdict", self._judged(TASKS[name], answers.get(name))))

    def _judged(self, task: Task, answer: Written | str | None) -> str:
        if answer is None:
            return NOT_ATTEMPTED
        try:
            if isinstance(answer, Written):
                return task.judge(answer, self._see).status
            self._see(Criterion("values", answer, FAIL))
        except Exception as error:  # of what the ranks have sent
            why = f"the check failed: {type(error).__name__}: {error}"
            self._see(Criterion("check", why, FAIL))
        return FAIL

    def _see(self, criterion: Criterion) -> None:
        trace = b""
        if criterion.trace is not None and criterion.status != PASS:
            with tempfile.TemporaryDirectory() as folder:
                trace = criterion.trace.save(Path(folder, "trace")).read_bytes()
        trace = trace if len(trace) <= self._room else b""
        self._room -= len(trace)
        said = criterion.text[:LONGEST]
        self._tell(("criterion", criterion.name, criterion.status, said, trace))
