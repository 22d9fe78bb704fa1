"""Builds a run's error from the reports of its ranks."""

from __future__ import annotations

import linecache
import re
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Sequence

from distkit._format import named, times
from distkit.cluster.notebook import in_notebook, line_label
from distkit.cluster.processes.rank_spec import CHANNEL_CLOSED
from distkit.cluster.runs.outcome import CONNECTION_BROKEN, Failure, Frame, Outcome
from distkit.diagnosis import rules
from distkit.diagnosis.deadlocks import raised, remedy_for_end
from distkit.diagnosis.findings import Finding, verb
from distkit.errors import (
    OWN,
    CommunicationWarning,
    DeadlockError,
    MismatchError,
    NotPicklableError,
    RankDied,
    RankError,
    RunError,
    RunInterrupted,
    is_generated,
    wrapped,
)
from distkit.recording.recorder import MACHINERY, is_user_file
from distkit.trace.calls import at, last_call
from distkit.trace.info import RankEnd, Replacement
from distkit.trace.trace import Trace

LOST_CELLS = (
    "the variables of %%ranks cells are lost: their processes have exited. The next cell starts "
    "new engines."
)

#: Exceptions this close together are ordered by rank, since a busy machine delays some [s].
SIMULTANEOUS = 0.1

#: Maximum number of replacements of a process in a run, because its failure may be permanent.
MAX_REPLACEMENTS = 3


def cause(status: int, *, expected: bool = False, log: str = "") -> str:
    """Return the cause of a process's exit.

    Args:
        status: exit status, as from ``os.waitstatus_to_exitcode``.
        expected: whether ``dk.inject_faults`` killed it.
        log: end of its log, which may contain gloo's reason.
    """
    if status == -signal.SIGKILL and expected:
        return "dk.inject_faults killed it, as requested"
    if status == CHANNEL_CLOSED:
        return (
            "it closed descriptors that distkit needs, as os.closerange() does, or changed modules"
        )
    how = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
    if sizes := _LARGER.search(log):
        how += f": gloo received {sizes[1]} bytes where {sizes[2]} were expected"
    return how


#: gloo's message if it received more than the tensor's size.
_LARGER = re.compile(r"op\.preamble\.length <= op\.nbytes\. (\d+) vs (\d+)")


def rank_ends(outcomes: Iterable[Outcome]) -> dict[int, RankEnd]:
    """Return the end of each rank, for the trace's ``info.ends``."""
    return {o.rank: _rank_end(o) for o in outcomes}


def _rank_end(outcome: Outcome) -> RankEnd:
    if outcome.died:
        return RankEnd(
            "died", outcome.died, _user_line(crash_frames(outcome.log)[::-1]), outcome.died_at
        )
    error = outcome.error
    if error is None:
        return RankEnd("returned", outcome.remark)
    if error.released or _is_consequence(error):
        return RankEnd("released")
    return RankEnd("raised", f"{error.type}: {error.text}", _user_line(error.frames))


def deadlock_error(
    findings: list[Finding], conclusion: str, trace: Callable[[], Trace]
) -> DeadlockError:
    """Return the error that consists of these findings and a conclusion."""
    kind = MismatchError if all(f.code in rules.MISMATCHES for f in findings) else DeadlockError
    error = kind("\n".join([*map(str, findings), conclusion]), findings)

    def draw(brief: bool = False) -> dict[str, str]:
        from distkit.views.scene import figures

        return figures.hang(findings, trace(), brief=brief)

    error.draw = draw
    return error


def with_state(text: str, conclusion: str) -> str:
    """Return a sentence that ends with ``conclusion``, the state of the cluster."""
    return f"{text}; {conclusion}." if conclusion else f"{text}."


def interrupt_error(
    name: str, after: str, outcomes: Iterable[Outcome], findings: Iterable[Finding] = ()
) -> RunInterrupted:
    """Return the error of ``cluster.interrupt()`` and of Ctrl-C."""
    texts = [with_state(f"{name} was stopped on all ranks", after), *_released_at(outcomes)]
    return RunInterrupted("\n".join([*map(str, notable(findings)), " ".join(texts)]))


def _released_at(outcomes: Iterable[Outcome]) -> list[str]:
    """Describe the user's lines where ranks were stopped."""
    ranks_by_line: dict[str, list[int]] = {}
    for o in outcomes:
        if o.error and o.error.released and (line := _user_line(o.error.frames)):
            ranks_by_line.setdefault(line, []).append(o.rank)
    parts = [f"{verb(r, 'were')}{at(line)}" for line, r in ranks_by_line.items()]
    return [text[:1].upper() + text[1:] for text in [f"{'; '.join(parts)}."] if parts]


def notable(findings: Iterable[Finding]) -> list[Finding]:
    """Return the findings, except for stragglers."""
    return [f for f in findings if f.code != rules.straggler.code]


def replacement_texts(name: str, replaced: list[Replacement]) -> list[str]:
    """Describe the processes that exited without ending the run."""
    consequence = {
        "worker": "and was replaced: a new process ran the function from its beginning",
        "server": "and its backup took over: no acknowledged push is lost. A second crash may "
        "lose values; the next run starts with all servers",
    }
    return [
        f"{r.name} exited during {name} ({r.how}), {consequence[r.name.split()[0]]}."
        for r in replaced
    ]


def warn(notices: Sequence[str | Finding], category: type[Warning] = CommunicationWarning) -> None:
    """Warn at the user's line, not at a line of distkit or of IPython, which runs magics."""
    frame = sys._getframe()
    while frame.f_back is not None and (
        (file := frame.f_code.co_filename).startswith(OWN) or not is_user_file(file)
    ):
        frame = frame.f_back
    file, _, line = line_label(f"{frame.f_code.co_filename}:{frame.f_lineno}").rpartition(":")
    head = f"{file}:{line}: {category.__name__}: "  # of the line that Python prints
    for notice in notices:
        warning = category(
            wrapped(f"{head}{notice}")[len(head) :] if in_notebook() else str(notice)
        )
        vars(warning)["notice"] = notice  # a notebook shows it as a card
        warnings.warn_explicit(warning, category, file, int(line))


def run_error(name: str, outcomes: list[Outcome], trace: Trace) -> RunError | None:
    """Return the error of a run; None if every rank returned.

    The error reports the first cause, then its consequences. The exit of a process explains other
    ranks' errors, unless one of them occurred earlier for another reason.

    Args:
        name: name of the function.
        outcomes: the outcomes, in the order in which the ranks ended.
        trace: the run's trace.
    """
    dead = [o for o in outcomes if o.died]
    raised = [(o, o.error) for o in outcomes if o.error and not o.error.released]
    causes = [(o, e) for o, e in raised if not _is_consequence(e)] or raised[:1]
    if dead and not (causes and _precedes(*causes[0], dead[0], outcomes)):
        return _death_error(dead[0], trace)
    if causes:
        return _exception_error(*_first_cause(causes), trace)
    if released := [o.rank for o in outcomes if o.error]:
        return RunError(f"{name} was stopped on {named(released)} before it finished.")
    return None


def _first_cause(raised: list[tuple[Outcome, Failure]]) -> tuple[int, Failure]:
    """Return the first exception; if several are simultaneous, the lowest rank's.

    A KVStoreError may be the consequence of another exception.
    """
    began = min(e.time for _, e in raised)
    simultaneous = [(o.rank, e) for o, e in raised if e.time - began < SIMULTANEOUS]
    return min(simultaneous, key=lambda item: (item[1].type == "KVStoreError", item[0]))


def _precedes(raised: Outcome, error: Failure, death: Outcome, ended: list[Outcome]) -> bool:
    """Return True if an exception cannot be the consequence of a process's exit."""
    return (
        ended.index(raised) < ended.index(death)
        and not _is_consequence(error)
        and error.type != "KVStoreError"
    )


def _is_consequence(error: Failure) -> bool:
    """Return True if a rank failed only because its connection to a peer broke."""
    return error.consequence or CONNECTION_BROKEN.search(error.text) is not None


def _findings(rank: int, default: str, trace: Trace) -> list[str]:
    """Return the finding about a rank's end, or ``default``; then findings about other ends."""
    findings = trace.diagnose()
    codes = {rules.raised.code, rules.died.code}
    ends = [f for f in findings if f.code in codes or f.rule is rules.unused_before]
    own = [f for f in findings if rank in f.victims] + [f for f in ends if rank in f.culprits]
    others = [f for f in ends if f not in own[:1]]
    return [str(own[0]) if own else default, *map(str, others)]


def _death_error(outcome: Outcome, trace: Trace) -> RankDied:
    rank, how, end = outcome.rank, outcome.died, _rank_end(outcome)
    exited = f"process of rank {rank} exited ({how})."
    finding, *others = _findings(
        rank, f"the {exited} {remedy_for_end(how)} [{rules.died.code}]", trace
    )
    if how not in finding:  # the finding names only the cause
        finding += f"\nThe {exited}"
    last, crash = last_call(trace.spans, rank), _crash_report(outcome.log)
    parts, lives = [finding, *others], sum(r.node == rank for r in trace.info.replaced)
    parts += [f"It was replaced {times(lives)} in this run."] if lives else []
    parts += [f"Its last output:\n{crash}"] if crash else []
    line = end.where or (last.where if last is not None else "")
    return RankDied("\n".join(parts), rank=rank, line=line)


def _crash_report(log: str, max_lines: int = 15) -> str:
    """Return the user's part of a crash report: the message, and the user's lines."""
    message = log.partition("Fatal Python error")[0].splitlines()[-max_lines:]
    return "\n".join([*message, _traceback(crash_frames(log))]).strip()


def crash_frames(log: str) -> list[Frame]:
    """Return the user's frames of the crashed thread in a log, innermost first."""
    report = log.partition("Fatal Python error")[2]
    stack = report.partition("(most recent call first):")[2].partition("\n\n")[0]
    frames = re.findall(r'File "(.+)", line (\d+) in (\S+)', stack)
    return [(file, int(line), name, None) for file, line, name in frames if is_user_file(file)]


def _exception_error(rank: int, error: Failure, trace: Trace) -> RunError:
    if error.type == "NotPicklableError":
        return NotPicklableError(f"rank {rank}: {error.text}")
    line, description = _user_line(error.frames), f"{error.type}: {error.text}"
    parts = _findings(rank, f"rank {rank} {raised(description, line)} [{rules.raised.code}]", trace)
    if trace.info.replaced and "process group has not been initialized" in error.text:
        parts.append(
            "A worker was replaced earlier. A torch.distributed group ends with any of its ranks, "
            'and a new process cannot join it. With on_crash="replace", let workers communicate '
            "through the store only."
        )
    visible = [
        f for f in error.frames if not (f[0].startswith(MACHINERY) or is_generated(f[0], f[2]))
    ]
    text = _traceback(visible or error.frames)
    parts.append(f"\nTraceback on rank {rank}:\n{text}{description}")
    if error.cause:
        parts.append(f"caused by {error.cause}")
    return RankError("\n".join(parts), rank=rank, line=line, exception=description, traceback=text)


def _user_line(frames: list[Frame]) -> str:
    """Return the innermost line of user code, not of an installed package or of Cython.

    A line of distkit's reference implementations counts only if there is no other.
    """
    known = sorted(
        (
            (file, number)
            for file, number, function, _ in reversed(frames)
            if file and is_user_file(file)
            if "." not in function and not is_generated(file, function)
        ),
        key=lambda line: line[0].startswith(OWN),
    )
    if not (known or frames):
        return ""
    file, number = known[0] if known else frames[-1][:2]
    return line_label(f"{file}:{number}")


def _traceback(frames: Iterable[Frame]) -> str:
    """Format frames of a rank; only the kernel knows the sources of cells."""
    entries = []
    for file, number, function, text in frames:
        linecache.checkcache(file)  # a script may have been edited since its last run
        source = linecache.getline(file, number).strip() or text
        entries.append(
            (line_label(f"{file}:{number}").rpartition(":")[0], number, function, source)
        )
    return "".join(traceback.format_list(entries))
