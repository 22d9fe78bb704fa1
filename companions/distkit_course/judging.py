"""The judge of one submission: a process that reads it, judges it and ends.

The submission's functions run on ranks, which send plain values to this process. It sends the rows
of the report to the process that writes it.
"""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from distkit.cluster.processes.channel import Channel
from distkit.cluster.processes.descendants import die_with_parent
from distkit.errors import DistkitError
from distkit.trace.trace import Trace
from distkit_course.confinement import JUDGE, limit_memory
from distkit_course.exercises import TASKS
from distkit_course.submissions import Written, read
from distkit_course.task import BLOCKED, FAIL, NOT_ATTEMPTED, PASS, Criterion, Task, Verdict

#: Longest message of a criterion [characters], and size of all traces of a submission [bytes].
LONGEST, EVIDENCE = 20_000, 1 << 25


def main(line: str, submission: str, *names: str) -> None:
    """Judge a submission.

    Args:
        line: the file descriptor of the channel to the process that writes the reports.
        submission: the path of the file.
        names: of the exercises; those in the submission if there are none.
    """
    die_with_parent()
    channel, room = Channel(socket.socket(fileno=int(line))), EVIDENCE
    limit_memory(JUDGE)
    try:
        answers = read(Path(submission))
    except DistkitError as error:
        channel.send(("unreadable", str(error)[:LONGEST]))
        return
    channel.send(("answers", chosen := names or tuple(answers)))
    for name in chosen:
        channel.send(("exercise", name))
        seen = [*_rows(TASKS[name], _judged(TASKS[name], answers.get(name)), room)]
        room -= sum(len(trace) for _, trace in seen)
        channel.send(("judged", seen))


def _judged(task: Task, answer: Written | str | None) -> Verdict:
    if answer is None:
        return task.not_attempted
    if isinstance(answer, str):
        return Verdict(task.name, FAIL, (Criterion("values", answer, FAIL),))
    try:
        return task.judge(answer)
    except Exception as error:  # the ranks may send anything
        why = f"the check failed: {type(error).__name__}: {error}"
        return Verdict(task.name, FAIL, (Criterion("check", why, FAIL),))


def _rows(task: Task, verdict: Verdict, room: int) -> Iterator[tuple[dict[str, Any], bytes]]:
    """The rows of a report, and the trace of what is not right; a mistake costs all that is left.

    Traces that are larger than ``room`` [bytes] are left out.
    """
    left = task.worth
    for seen in verdict.criteria or [Criterion("attempt", "", NOT_ATTEMPTED)]:
        of = {BLOCKED: 0, FAIL: left, NOT_ATTEMPTED: left}.get(seen.status, 1)
        left -= of or 1
        trace = b"" if seen.status == PASS else _saved(seen.trace)
        trace = trace if len(trace) <= room else b""
        room -= len(trace)
        yield row(f"{task.name}.{seen.name}", seen.status, of, seen.text), trace


def _saved(trace: Trace | None) -> bytes:
    if trace is None:
        return b""
    with tempfile.TemporaryDirectory() as folder:
        return trace.save(Path(folder, "trace")).read_bytes()


def row(name: str, status: str, of: int, message: str) -> dict[str, Any]:
    """A row of a report: a criterion, its points and their maximum."""
    points = of if status == PASS else 0
    said = message[:LONGEST]
    return {"criterion": name, "status": status, "points": points, "max": of, "message": said}
