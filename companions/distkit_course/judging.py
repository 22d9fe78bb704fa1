"""The judge process for one submission.

The submission's functions run on ranks, which send plain values to the judge process. The judge
process sends the rows of the report to the grading process.
"""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from distkit.cluster.processes.channel import Channel
from distkit.cluster.processes.cleanup import die_with_parent
from distkit.errors import DistkitError
from distkit.trace.trace import Trace
from distkit_course.confinement import JUDGE, limit_memory
from distkit_course.exercises import TASKS
from distkit_course.submissions import SubmittedFunction, read
from distkit_course.task import BLOCKED, FAIL, NOT_ATTEMPTED, PASS, Criterion, Task, Verdict

#: Limits: the message of a criterion [characters], all traces of a submission [bytes].
MAX_MESSAGE, MAX_EVIDENCE = 20_000, 1 << 25


def main(fd: str, submission: str, *names: str) -> None:
    """Judge a submission.

    Args:
        fd: the file descriptor of the channel to the grading process.
        submission: the path of the file.
        names: names of exercises; if empty, the exercises of the submission.
    """
    die_with_parent()
    channel, budget = Channel(socket.socket(fileno=int(fd))), MAX_EVIDENCE
    limit_memory(JUDGE)
    try:
        answers = read(Path(submission))
    except DistkitError as error:
        channel.send(("unreadable", str(error)[:MAX_MESSAGE]))
        return
    channel.send(("answers", selected := names or tuple(answers)))
    for name in selected:
        channel.send(("exercise", name))
        rows = [*_rows(TASKS[name], _judge(TASKS[name], answers.get(name)), budget)]
        budget -= sum(len(trace) for _, trace in rows)
        channel.send(("judged", rows))


def _judge(task: Task, answer: SubmittedFunction | str | None) -> Verdict:
    if answer is None:
        return task.not_attempted
    if isinstance(answer, str):
        return Verdict(task.name, FAIL, (Criterion("values", answer, FAIL),))
    try:
        return task.judge(answer)
    except Exception as error:  # the ranks may send anything
        message = f"the check failed: {type(error).__name__}: {error}"
        return Verdict(task.name, FAIL, (Criterion("check", message, FAIL),))


def _rows(task: Task, verdict: Verdict, budget: int) -> Iterator[tuple[dict[str, Any], bytes]]:
    """Yield rows of a report, with traces of criteria that did not pass.

    A failure costs all remaining points. A trace is omitted if it would exceed the remaining
    ``budget`` [bytes].
    """
    remaining = task.worth
    for criterion in verdict.criteria or [Criterion("attempt", "", NOT_ATTEMPTED)]:
        points = {BLOCKED: 0, FAIL: remaining, NOT_ATTEMPTED: remaining}.get(criterion.status, 1)
        remaining -= points or 1
        trace = b"" if criterion.status == PASS else _trace_bytes(criterion.trace)
        trace = trace if len(trace) <= budget else b""
        budget -= len(trace)
        yield row(f"{task.name}.{criterion.name}", criterion.status, points, criterion.text), trace


def _trace_bytes(trace: Trace | None) -> bytes:
    if trace is None:
        return b""
    with tempfile.TemporaryDirectory() as folder:
        return trace.save(Path(folder, "trace")).read_bytes()


def row(name: str, status: str, worth: int, message: str) -> dict[str, Any]:
    """Return a row of a report, with a criterion, its points and their maximum."""
    points = worth if status == PASS else 0
    return {
        "criterion": name,
        "status": status,
        "points": points,
        "max": worth,
        "message": message[:MAX_MESSAGE],
    }
