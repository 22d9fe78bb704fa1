"""Builds a run's error from the outcomes of its ranks."""

from __future__ import annotations

import linecache
import traceback
from collections.abc import Iterable

from distkit._format import named, times
from distkit.cluster.notebook import line_label
from distkit.cluster.runs.outcome import (
    Failure,
    Frame,
    Outcome,
    crash_frames,
    line_in,
    rank_end,
)
from distkit.diagnosis import rules
from distkit.diagnosis.deadlocks import raised, remedy_for_end
from distkit.diagnosis.rules import Finding, verb
from distkit.errors import (
    DeadlockError,
    MismatchError,
    NotPicklableError,
    RankDied,
    RankError,
    RunError,
    RunInterrupted,
    is_generated,
)
from distkit.recording.recorder import HIDDEN_FILES
from distkit.trace.calls import at, last_call
from distkit.trace.info import Replacement
from distkit.trace.trace import Trace

#: Exceptions within this time of the first [s] are considered simultaneous, because a busy machine
#: may delay some of them.
SIMULTANEOUS = 0.1


def deadlock_error(findings: list[Finding], conclusion: str, trace: Trace) -> DeadlockError:
    """Return an error whose message consists of the findings and a conclusion."""
    kind = MismatchError if all(f.code in rules.MISMATCHES for f in findings) else DeadlockError
    error = kind("\n".join([*map(str, findings), conclusion]), findings)

    def draw(brief: bool = False) -> dict[str, str]:
        from distkit.views.scene import figures

        return figures.hang(findings, trace, brief=brief)

    error.draw = draw
    return error


def with_state(text: str, conclusion: str) -> str:
    """Return a sentence that ends with ``conclusion``, the state of the cluster."""
    return f"{text}; {conclusion}." if conclusion else f"{text}."


def interrupt_error(
    name: str, conclusion: str, outcomes: Iterable[Outcome], findings: Iterable[Finding] = ()
) -> RunInterrupted:
    """Return the error for ``cluster.interrupt()`` and for Ctrl-C."""
    texts = [
        with_state(f"{name} was stopped on all ranks", conclusion),
        *_stop_positions(outcomes),
    ]
    return RunInterrupted("\n".join([*map(str, notable(findings)), " ".join(texts)]))


def _stop_positions(outcomes: Iterable[Outcome]) -> list[str]:
    """Describe the user's lines at which ranks were stopped."""
    ranks_by_line: dict[str, list[int]] = {}
    for o in outcomes:
        if o.error and o.error.released and (line := line_in(o.error.frames)):
            ranks_by_line.setdefault(line, []).append(o.rank)
    parts = [f"{verb(r, 'were')}{at(line)}" for line, r in ranks_by_line.items()]
    return [text[:1].upper() + text[1:] for text in [f"{'; '.join(parts)}."] if parts]


def notable(findings: Iterable[Finding], *, in_cell: bool = False) -> list[Finding]:
    """Return the findings to show.

    Stragglers are omitted, and so are a cell's unmatched messages, since a later cell may match
    them.
    """
    unmatched = {rules.no_receiver.code, rules.no_sender.code} if in_cell else set()
    return [f for f in findings if f.code not in {rules.straggler.code, *unmatched}]


def replacement_texts(name: str, replaced: list[Replacement]) -> list[str]:
    """Describe the processes that exited without ending the run."""
    consequence = {
        "worker": f"and was replaced: a new process ran {name} from its beginning",
        "server": "and its backup took over if the store has replication=2; in that case, no "
        "acknowledged push is lost. A second crash may lose values; the next run starts with all "
        "servers",
    }
    return [
        f"{r.name} exited during {name} ({r.how}), {consequence[r.name.split()[0]]}."
        for r in replaced
    ]


def run_error(name: str, outcomes: list[Outcome], trace: Trace) -> RunError | None:
    """Return the error of a run, or None if every rank returned.

    The error reports the first cause, then its consequences. The exit of a process explains other
    ranks' errors, unless one of them occurred earlier for another reason.

    Args:
        name: name of the function.
        outcomes: the outcomes, in the order in which the ranks ended.
        trace: the run's trace.
    """
    dead = [o for o in outcomes if o.died]
    errors = [(o, o.error) for o in outcomes if o.error and not o.error.released]
    causes = [(o, e) for o, e in errors if not e.consequence] or errors[:1]
    if dead and not (causes and _precedes(*causes[0], dead[0], outcomes)):
        return _death_error(dead[0], trace)
    if causes:
        return _exception_error(*_first_cause(causes), trace)
    if ranks := [o.rank for o in outcomes if o.error]:
        return RunError(f"{name} was stopped on {named(ranks)} before it finished.")
    return None


def _first_cause(errors: list[tuple[Outcome, Failure]]) -> tuple[int, Failure]:
    """Return the first exception; if several are simultaneous, the lowest rank's.

    A KVStoreError comes last, because it may be the consequence of another exception.
    """
    first = min(e.time for _, e in errors)
    simultaneous = [(o.rank, e) for o, e in errors if e.time - first < SIMULTANEOUS]
    return min(simultaneous, key=lambda item: (item[1].type == "KVStoreError", item[0]))


def _precedes(outcome: Outcome, error: Failure, death: Outcome, outcomes: list[Outcome]) -> bool:
    """Return True if an exception cannot be the consequence of a process's exit."""
    return (
        outcomes.index(outcome) < outcomes.index(death)
        and not error.consequence
        and error.type != "KVStoreError"
    )


def _findings(rank: int, default: str, trace: Trace) -> list[str]:
    """Return the finding about a rank's end, or ``default``, and the findings about other ends."""
    findings = trace.diagnose()
    codes = {rules.raised.code, rules.died.code}
    ends = [f for f in findings if f.code in codes or f.rule is rules.unused_before]
    matches = [f for f in findings if rank in f.victims] + [f for f in ends if rank in f.culprits]
    return [
        str(matches[0]) if matches else default,
        *(str(f) for f in ends if f not in matches[:1]),
    ]


def _death_error(outcome: Outcome, trace: Trace) -> RankDied:
    rank, cause, end = outcome.rank, outcome.died, rank_end(outcome)
    exit_text = f"process of {named([rank])} exited ({cause})."
    finding, *others = _findings(
        rank, f"the {exit_text} {remedy_for_end(cause)} [{rules.died.code}]", trace
    )
    if cause not in finding:  # the finding reports only what led to the exit
        finding += f"\nThe {exit_text}"
    last, crash = last_call(trace.spans, rank), _crash_report(outcome.log)
    parts, replacements = [finding, *others], sum(r.node == rank for r in trace.info.replaced)
    parts += [f"It was replaced {times(replacements)} in this run."] if replacements else []
    parts += [f"Its last output:\n{crash}"] if crash else []
    line = end.where or (last.where if last is not None else "")
    return RankDied("\n".join(parts), rank=rank, line=line)


def _crash_report(log: str, max_lines: int = 15) -> str:
    """Return the message and the user's lines of a crash report."""
    message = log.partition("Fatal Python error")[0].splitlines()[-max_lines:]
    return "\n".join([*message, _traceback(crash_frames(log))]).strip()


def _exception_error(rank: int, error: Failure, trace: Trace) -> RunError:
    if error.type == "NotPicklableError":
        return NotPicklableError(f"{named([rank])}: {error.text}")
    line, description = line_in(error.frames), f"{error.type}: {error.text}"
    parts = _findings(
        rank, f"{named([rank])} {raised(description, line)} [{rules.raised.code}]", trace
    )
    if trace.info.replaced and "process group has not been initialized" in error.text:
        parts.append(
            "A worker was replaced earlier. A torch.distributed group ends when one of its ranks "
            'exits, and a new process cannot join it. With on_crash="replace", workers can '
            "communicate only through the store."
        )
    visible = [
        f for f in error.frames if not (f[0].startswith(HIDDEN_FILES) or is_generated(f[0], f[2]))
    ]
    text = _traceback(visible or error.frames)
    parts.append(f"\nTraceback on {named([rank])}:\n{text}{description}")
    if error.cause:
        parts.append(f"caused by {error.cause}")
    return RankError("\n".join(parts), rank=rank, line=line, exception=description, traceback=text)


def _traceback(frames: Iterable[Frame]) -> str:
    """Format frames from a rank; only the kernel knows the sources of cells."""
    entries = []
    for file, number, function, text in frames:
        linecache.checkcache(file)  # a script may have been edited since its last run
        source = linecache.getline(file, number).strip() or text
        entries.append(
            (line_label(f"{file}:{number}").rpartition(":")[0], number, function, source)
        )
    return "".join(traceback.format_list(entries))
