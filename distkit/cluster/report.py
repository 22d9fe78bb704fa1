"""Turning what the ranks report into one error that a reader understands. Pure."""

from __future__ import annotations

import linecache
import re
import signal
import sys
import warnings
from typing import TYPE_CHECKING, Any

from distkit.calls import SILENT, STOPPED, last_call, seen, silence
from distkit.cluster.lives import MOST
from distkit.cluster.notebook import place
from distkit.errors import (
    CommunicationWarning,
    DeadlockError,
    NotPicklableError,
    RankDied,
    RankError,
    RunError,
    RunStopped,
    is_generated,
)
from distkit.events import State, Trace
from distkit.trace.evidence import ASKED
from distkit.trace.findings import Finding, Kind, times
from distkit.trace.recorder import MACHINERY, PACKAGE, is_users
from distkit.trace.waits import gone, search

if TYPE_CHECKING:
    from distkit.cluster.run import Run

#: What torch says where there is no process group.
_NO_GROUP = "process group has not been initialized"

Outcome = dict[str, Any]
Frame = tuple[str, int, str, "str | None"]


def lost(rank: int) -> Outcome:
    """The outcome of a rank that could not even be ended."""
    return {"rank": rank, "died": "no answer", "log": "", "intact": False}


def cause(status: int, *, asked: bool = False, hung: float = 0.0) -> str:
    """How a process ended: by its exit status, and by what was meant to end it.

    ``hung`` is how long it had been silent when it was ended for that [s]; 0 if it was not.
    """
    if status == -signal.SIGKILL and (asked or hung):
        return "dk.trouble killed it, as asked" if asked else f"it {silence(hung)}"
    return f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"


def ends(outcomes: list[Outcome]) -> dict[str, dict[str, str]]:
    """How each rank ended, for the trace's ``meta["ends"]``."""
    return {str(o["rank"]): _end(o) for o in outcomes}


def _end(outcome: Outcome) -> dict[str, str]:
    if "died" in outcome:
        how = "released" if outcome.get("released") else "died"
        return {"how": how, "text": outcome["died"], "where": ""}
    if "error" not in outcome:
        return {"how": "returned", "text": outcome.get("remark", ""), "where": ""}
    error = outcome["error"]
    if error["released"] or _is_consequence(outcome):
        return {"how": "released", "text": "", "where": ""}
    text = f"{error['type']}: {error['text']}"
    return {"how": "raised", "text": text, "where": _users_line(error["frames"])}


def deadlock(name: str, findings: list[Finding]) -> DeadlockError:
    """The error of a run that could not go on."""
    said = "\n".join(map(str, findings))
    over = "All ranks were released, and the cluster is ready for the next run."
    return DeadlockError(f"{name} cannot go on: {said}\n{over}", findings)


def stopped(run: Run) -> RunStopped:
    """What the stop button raises: with the reason, if the run could not have gone on."""
    found = [str(f) for f in run.findings if f.hang]
    error = RunStopped("\n".join([f"{run.name} was interrupted on all ranks.", *found]))
    error.run = run
    return error


def of_findings(findings: list[Finding]) -> list[str]:
    """Mistakes that hang nobody."""
    return [str(f) for f in findings if f.kind is not Kind.STRAGGLER]


def of_replacements(name: str, replaced: list[dict[str, Any]]) -> list[str]:
    """Those that ended without ending the run."""
    again = {
        "scheduler": "another went on where it was",
        "server": "a server with its copies serves in its place, and nothing that was acknowledged "
                  "is lost. Until the next run its values have one copy less",
    }  # fmt: skip
    return [
        f"{r['name'].replace('scheduler', 'the scheduler')} {gone(r['how'])} in the middle of "
        f"{name} ({r['how']}), and was replaced at once: "
        f"{again.get(r['name'].split()[0], 'another ran the function from its beginning')}."
        f"{f' {STOPPED}' if SILENT in r['how'] else ''}"
        for r in replaced
    ]


def warn(texts: list[str]) -> None:
    """Warn at the reader's line."""
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(PACKAGE):
        frame = frame.f_back
    for text in texts:
        file, _, line = place(f"{frame.f_code.co_filename}:{frame.f_lineno}").rpartition(":")
        warnings.warn_explicit(text, CommunicationWarning, file, int(line))


def verdict(name: str, outcomes: list[Outcome], order: list[int], trace: Trace) -> RunError | None:
    """The error of a run, None when every rank returned.

    A death explains the errors of others, and an exception explains why
    others were released: the first cause is the one reported.
    """
    ended = sorted(outcomes, key=lambda o: order.index(o["rank"]) if o["rank"] in order else 0)
    dead = [o for o in ended if "died" in o]
    raised = [o for o in ended if "error" in o and not o["error"]["released"]]
    causes = [o for o in raised if not _is_consequence(o)] or raised[:1]
    others = [o["rank"] for o in ended if "error" in o and o not in causes]
    if dead:
        return _death(name, dead, trace)
    if causes:
        return _exception(name, causes[0], [o["rank"] for o in causes[1:]], others, trace)
    if others:
        return RunError(f"{name} was released on ranks {listing(others)} before it finished.")
    return None


def _is_consequence(outcome: Outcome) -> bool:
    """Whether a rank failed only because its peer's connection broke."""
    return re.search(r"Connection (closed|reset) by peer", outcome["error"]["text"]) is not None


def _death(name: str, dead: list[Outcome], trace: Trace) -> RankDied:
    rank, log = dead[0]["rank"], dead[0]["log"]
    line, where = _last_place(trace, rank, log)
    others = f" (and so did {listing([o['rank'] for o in dead[1:]])})" if dead[1:] else ""
    words = _last_words(log)
    said = f"\nIts last words:\n{words}" if words else ""
    found = trace.diagnose()
    why = [f for f in found if f.kind not in (Kind.DIED, Kind.RAISED, Kind.STRAGGLER)]
    how, remedy = dead[0]["died"], search(dead[0]["died"])
    for f in found:
        if f.kind is Kind.DIED and rank in f.culprits:
            remedy = f.remedy
    remedy = remedy[:1].lower() + remedy[1:]
    if ASKED in how:
        remedy = "nothing is wrong with the program."
    return RankDied(
        f"the process of rank {rank} {gone(how)} in the middle of {name} ({how}){others}"
        f"{where}. {_before(trace, rank)}"
        f"The next run has a new one; {why[0] if why else remedy}{said}",
        rank=rank, line=line,
    )  # fmt: skip


def _before(trace: Trace, rank: int) -> str:
    """How others ended in its place, in the same run."""
    hows = [r["how"] for r in trace.meta.get("replaced", []) if r["node"] == rank]
    if not hows:
        return ""
    how = hows[0] if len({*hows}) == 1 else "; ".join(hows)
    most = ", which is the most," if len(hows) >= MOST else ""
    return f"In this run it was replaced {times(len(hows))}{most} and ended each time ({how}). "


def _last_words(log: str, most: int = 15) -> str:
    """What a crash report says to the user: the message, and the lines that are theirs."""
    message = log.partition("Fatal Python error")[0].splitlines()[-most:]
    crashed = log.partition("(most recent call first):")[2].partition("\n\n")[0]
    frames = re.findall(r'File "(.+)", line (\d+) in (\S+)', crashed)
    theirs = [_frame(f, int(n), function, None) for f, n, function in frames if is_users(f)]
    return "\n".join([*message, *(frame.rstrip() for frame in theirs)]).strip()


def _exception(
    name: str, first: Outcome, also: list[int], others: list[int], trace: Trace
) -> RunError:
    error, rank = first["error"], first["rank"]
    if error["type"] == "_Unpicklable":
        return NotPicklableError(f"rank {rank}: {error['text']}")
    line = _users_line(error["frames"])
    parts = [f"rank {rank} raised {error['type']}: {error['text']}{_at(line)}"]
    if error["type"] == "SystemExit":
        parts = [f"rank {rank} called sys.exit({error['text']}){_at(line)}. Return instead."]
    if also:
        parts.append(f"Ranks that raised, too: {listing(also)}.")
    if others:
        waits = "; ".join(_waited(trace, r) for r in others)
        parts.append(f"The others were released: {waits}.")
    text = "".join(_frame(*frame) for frame in _shown(error["frames"]))
    if trace.meta.get("replaced") and (_is_consequence(first) or _NO_GROUP in error["text"]):
        parts.append(
            "A worker was replaced before: torch.distributed's groups end with any of their "
            'ranks, and have no place for a new one. With on_crash="replace" let the workers '
            "speak through the store alone."
        )
    parts.append(f"\nTraceback on rank {rank}:\n{text}{error['type']}: {error['text']}")
    if error["cause"]:
        parts.append(f"caused by {error['cause']}")
    return RankError("\n".join(parts), rank=rank, line=line, traceback=text)


def _users_line(frames: list[Frame]) -> str:
    """The innermost line that is the user's: not in an installed package."""
    for file, number, function, _ in reversed(frames):
        if is_users(file) and not is_generated(file, function):
            return place(f"{file}:{number}")
    return place(f"{frames[-1][0]}:{frames[-1][1]}") if frames else ""


def _shown(frames: list[Frame]) -> list[Frame]:
    """The traceback without distkit's machinery, as far as the user's lines explain it."""
    return [
        f for f in frames if not (f[0].startswith(MACHINERY) or is_generated(f[0], f[2]))
    ] or frames


def _frame(file: str, number: int, function: str, text: str | None) -> str:
    """One frame of a remote traceback; cells' sources are known only here."""
    source = linecache.getline(file, number).strip() or (text or "")
    label, _, line = place(f"{file}:{number}").rpartition(":")
    shown = f'  File "{label}", line {line}, in {function}\n'
    return shown + (f"    {source}\n" if source else "")


def _waited(trace: Trace, rank: int) -> str:
    """What a released rank was in, as far as the trace tells."""
    for span in reversed(trace.spans):
        if span.rank == rank and span.state is State.SCHEDULED:
            return f"rank {rank} was paused before {span.op}{_at(span.where)}"
        if span.rank == rank and span.state in (State.FAILED, State.STARTED, State.BLOCKED):
            peer = "" if span.peer is None else f" with {_name(trace, span.peer)}"
            return f"rank {rank} was in {span.op}{peer}{_at(span.where)}"
    return f"rank {rank}"


def _name(trace: Trace, rank: int) -> str:
    return str(trace.meta.get("ranks", {}).get(str(rank), {}).get("name", f"rank {rank}"))


def _last_place(trace: Trace, rank: int, log: str) -> tuple[str, str]:
    """Where a rank was, and that in words.

    A crash report names the line that it died at, the innermost of the user's. What is recorded
    names no more than its last call.
    """
    for file, number in re.findall(r'File "(.+)", line (\d+) in ', log):
        if is_users(file):
            line = place(f"{file}:{number}")
            return line, _at(line)
    last = last_call(trace.spans, rank)
    return (last.where, f"; it was {seen(last)}") if last is not None else ("", "")


def _at(line: str) -> str:
    return f" at {line}" if line else ""


def listing(ranks: list[int]) -> str:
    """Ranks in a sentence."""
    return ", ".join(map(str, sorted(ranks)))
