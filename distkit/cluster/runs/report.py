"""Turning what the ranks report into one error that a reader understands. Pure."""

from __future__ import annotations

import linecache
import re
import signal
import sys
import warnings
from collections.abc import Iterable

from distkit._format import named, times
from distkit.cluster.notebook import place
from distkit.cluster.processes.rank_spec import LINE_CLOSED
from distkit.cluster.runs.outcome import BROKEN, Failure, Frame, Outcome
from distkit.cluster.runs.outcome import text as text_of
from distkit.diagnosis import rules
from distkit.diagnosis.deadlocks import gone, raised, search
from distkit.diagnosis.findings import Finding, fill, verb
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
)
from distkit.recording.recorder import MACHINERY, is_users
from distkit.trace.calls import SILENT, STOPPED, at, last_call, silence
from distkit.trace.info import RankEnd, Replacement
from distkit.trace.trace import Trace

#: What torch says where there is no process group, and why that is.
_NO_GROUP = "process group has not been initialized"
_GROUP_IS_OVER = (
    "A worker was replaced before. A torch.distributed group ends with any of its ranks, "
    'and a new process cannot join it. With on_crash="replace", let workers communicate '
    "through the store only."
)

LOST_CELLS = (
    "the variables of %%ranks cells are lost: their processes have ended. The next cell starts new "
    "engines."
)

#: Exceptions this close in time are told in the order of ranks [s]: a busy machine shifts them.
TOGETHER = 0.1

#: A process is replaced at most so often in a run: one that always ends does so for a reason.
MOST_REPLACEMENTS = 3


def cause(status: int, *, asked: bool = False, silent_for: float = 0.0, log: str = "") -> str:
    """The end of a process: by its exit status, and by what was meant to end it.

    Args:
        status: as ``os.waitstatus_to_exitcode`` has it.
        asked: ``dk.trouble`` has killed it.
        silent_for: for how long it was when it was ended for that [s]; 0 if it was not.
        log: the last of what it wrote, in which gloo may say why.
    """
    if status == -signal.SIGKILL and (asked or silent_for):
        return "dk.trouble killed it, as asked" if asked else f"it {silence(silent_for)}"
    if status == LINE_CLOSED:
        return "it broke what distkit needs: descriptors, as os.closerange() does, or modules"
    how = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
    larger = _LARGER.search(log)
    said = "gloo received {} bytes where {} were expected"
    return f"{how}: {said.format(*larger.groups())}" if larger is not None else how


#: gloo's last words when a message is larger than the tensor that it is for.
_LARGER = re.compile(r"op\.preamble\.length <= op\.nbytes\. (\d+) vs (\d+)")


def of_fork(what: str) -> str:
    """The refusal in a process that was forked while its parent had this."""
    return (
        f"{what} belongs to the process that this one was forked from. Use it there, or make a "
        "cluster here: dk.Cluster()."
    )


def ends(outcomes: Iterable[Outcome]) -> dict[int, RankEnd]:
    """The end of each rank, for the trace's ``info.ends``."""
    return {o.rank: _end(o) for o in outcomes}


def _end(outcome: Outcome) -> RankEnd:
    if outcome.died:
        return RankEnd("died", outcome.died, _crash_line(outcome.log), outcome.died_at)
    error = outcome.error
    if error is None:
        return RankEnd("returned", outcome.remark)
    if error.released or _is_consequence(error):
        return RankEnd("released")
    return RankEnd("raised", f"{error.type}: {error.text}", _users_line(error.frames))


def unreadable(rank: int, kind: str, error: BaseException) -> NotPicklableError:
    """The error of a result that cannot be read in the notebook."""
    return NotPicklableError(
        f"rank {rank} returned a {kind} that cannot be unpickled here "
        f"({type(error).__name__}: {text_of(error)}). "
        "Return plain data: numbers, strings, lists, dicts, tensors."
    )


def mistaken(name: str, error: Exception) -> RunError:
    """The error of a run that distkit could not see through to its end."""
    return RunError(
        f"internal error in distkit while it ran {name} "
        f"({type(error).__name__}: {text_of(error)}). Its ranks were ended. Please report it."
    )


def deadlock(
    name: str, findings: list[Finding], outcomes: Iterable[Outcome], afterwards: str = ""
) -> DeadlockError:
    """The error of a run that could not go on; ``afterwards``: what can be done next."""
    told = {rank for f in findings if f.code == rules.raised.code for rank in f.culprits}
    others = (o for o in outcomes if o.rank not in told)
    caught = [said for o in others for said in _raised_before(o.rank, o.error)]
    over = _after(f"{name} was stopped on all ranks", afterwards)
    return of_deadlock(findings, [*caught, over])


def _raised_before(rank: int, error: Failure | None) -> list[str]:
    """The exception that a rank had raised before it was released or its connection broke."""
    before = error.handled if error is not None else None
    if before is None:
        return []
    said = raised(f"{before.type}: {before.text}", _users_line(before.frames))
    return [f"Before that, rank {rank} {said}."]


def of_deadlock(findings: list[Finding], more: Iterable[str]) -> DeadlockError:
    """The error that begins with these findings, and goes on with ``more``."""
    differ = all(f.code in rules.MISMATCHES for f in findings)
    kind = MismatchError if differ else DeadlockError
    return kind("\n".join([*map(str, findings), *more]), findings)


def _after(said: str, afterwards: str) -> str:
    return f"{said}; {afterwards}." if afterwards else f"{said}."


def of_stop(rank: int, how: str, pid: int | str) -> str:
    """A rank whose process was stopped: nothing of its program is executed any more."""
    return (
        f"rank {rank} is stopped ({how}), and ranks that wait for it stay blocked. "
        f"{fill(rules.stopped.remedy, pid=pid)} [{rules.stopped.code}]"
    )


def interrupted(
    name: str, after: str, outcomes: Iterable[Outcome], findings: Iterable[Finding] = ()
) -> RunInterrupted:
    """The error of ``cluster.interrupt()`` and of Ctrl-C."""
    said = [_after(f"{name} was interrupted on all ranks", after), *_where_they_were(outcomes)]
    return RunInterrupted("\n".join([*of_findings(findings), " ".join(said)]))


def _where_they_were(outcomes: Iterable[Outcome]) -> list[str]:
    """From which of the user's lines ranks were pulled out."""
    places: dict[str, list[int]] = {}
    for o in outcomes:
        if o.error and o.error.released and (line := _users_line(o.error.frames)):
            places.setdefault(line, []).append(o.rank)
    said = [f"{verb(r, 'were')}{at(line)}" for line, r in places.items()]
    return [text[:1].upper() + text[1:] for text in [f"{'; '.join(said)}."] if said]


def of_findings(findings: Iterable[Finding]) -> list[str]:
    """What was found, but for ranks that are only slow."""
    return [str(f) for f in findings if f.code != rules.straggler.code]


def of_replacements(name: str, replaced: list[Replacement]) -> list[str]:
    """Those that ended without ending the run."""
    then = {
        "worker": "and was replaced at once: a new process ran the function from its beginning",
        "server": "and its backup answered in its place: no acknowledged push is lost. A second "
        "crash may lose values; the next run has all its servers again",
    }
    return [
        f"{r.name} {gone(r.how)} in the middle of {name} ({r.how}), "
        f"{then[r.name.split()[0]]}.{f' {STOPPED}' if SILENT in r.how else ''}"
        for r in replaced
    ]


def of_copies(name: str, outcomes: Iterable[Outcome]) -> list[str]:
    """Containers of the notebook whose copies on the ranks have grown."""
    names = dict.fromkeys(n for o in outcomes for n in o.grown)
    return [
        f"{name} changed {one} on the ranks. Each rank has its own copy, so the notebook's {one} "
        "is unchanged: return what you need."
        for one in names
    ]


def warn(texts: list[str], category: type[Warning] = CommunicationWarning) -> None:
    """Warn at the reader's line: not at one of distkit, nor of IPython, which runs a magic."""
    frame = sys._getframe()
    while frame.f_back is not None and (
        (file := frame.f_code.co_filename).startswith(OWN) or not is_users(file)
    ):
        frame = frame.f_back
    for text in texts:
        file, _, line = place(f"{frame.f_code.co_filename}:{frame.f_lineno}").rpartition(":")
        warnings.warn_explicit(text, category, file, int(line))


def verdict(name: str, outcomes: list[Outcome], trace: Trace) -> RunError | None:
    """The error of a run, None when every rank returned.

    The first cause is the one reported; what came of it is told after it. A death explains the
    errors of others, unless one of them was there before it and speaks of something else.

    Args:
        name: of the function.
        outcomes: in the order in which the ranks ended.
        trace: of the run.
    """
    dead = [o for o in outcomes if o.died]
    raised = [(o, o.error) for o in outcomes if o.error and not o.error.released]
    causes = [(o, e) for o, e in raised if not _is_consequence(e)] or raised[:1]
    if dead and not (causes and _came_first(*causes[0], dead[0], outcomes)):
        return _death(dead[0], trace)
    if causes:
        return _exception(*_first(causes), trace)
    if released := [o.rank for o in outcomes if o.error]:
        return RunError(f"{name} was released on {named(released)} before it finished.")
    return None


def _first(raised: list[tuple[Outcome, Failure]]) -> tuple[int, Failure]:
    """The first to raise; among those that raised together, whose order is chance, the lowest rank.

    A KVStoreError may come of another's exception.
    """
    began = min(e.time for _, e in raised)
    together = [(o.rank, e) for o, e in raised if e.time - began < TOGETHER]
    return min(together, key=lambda one: (one[1].type == "KVStoreError", one[0]))


def _came_first(raised: Outcome, error: Failure, death: Outcome, ended: list[Outcome]) -> bool:
    """True if an exception cannot come of a death."""
    before = ended.index(raised) < ended.index(death)
    return before and not _is_consequence(error) and error.type != "KVStoreError"


def _is_consequence(error: Failure) -> bool:
    """True if a rank failed only because its peer's connection broke."""
    return error.consequence or BROKEN.search(error.text) is not None


def _findings(rank: int, otherwise: str, trace: Trace) -> list[str]:
    """What a diagnosis finds of a rank's end, or else this; and what it finds of other ends."""
    found = trace.diagnose()
    codes = {rules.raised.code, rules.died.code}
    ends = [f for f in found if f.code in codes or f.rule is rules.unused_before]
    its = [f for f in found if rank in f.victims] + [f for f in ends if rank in f.culprits]
    others = [f for f in ends if f not in its[:1]]
    return [str(its[0]) if its else otherwise, *map(str, others)]


def _death(outcome: Outcome, trace: Trace) -> RankDied:
    rank, how, end = outcome.rank, outcome.died, _end(outcome)
    ended = f"process of rank {rank} {gone(how)} ({how})."
    said, *others = _findings(rank, f"the {ended} {search(how)} [{rules.died.code}]", trace)
    if how not in said:  # it is told of what led to that
        said += f"\nThe {ended}"
    last, words = last_call(trace.spans, rank), _last_words(outcome.log)
    parts = [f"{said} {_before(trace, rank)}".rstrip(), *others]
    parts += [f"Its last words:\n{words}"] if words else []
    line = end.where or (last.where if last is not None else "")
    return RankDied("\n".join(parts), rank=rank, line=line)


def _before(trace: Trace, rank: int) -> str:
    """The ends of others in its place, in the same run."""
    hows = [r.how for r in trace.info.replaced if r.node == rank]
    if not hows:
        return ""
    most = ", which is the most," if len(hows) >= MOST_REPLACEMENTS else ""
    each = "; ".join(dict.fromkeys(hows))
    return f"In this run it was replaced {times(len(hows))}{most} and ended each time ({each})."


def _last_words(log: str, most: int = 15) -> str:
    """The part of a crash report for the user: the message, and the lines that are theirs."""
    message = log.partition("Fatal Python error")[0].splitlines()[-most:]
    crashed = log.partition("(most recent call first):")[2].partition("\n\n")[0]
    frames = re.findall(r'File "(.+)", line (\d+) in (\S+)', crashed)
    theirs = [_frame(f, int(n), function, None) for f, n, function in frames if is_users(f)]
    return "\n".join([*message, *(frame.rstrip() for frame in theirs)]).strip()


def _exception(rank: int, error: Failure, trace: Trace) -> RunError:
    if error.type == "_Unpicklable":
        return NotPicklableError(f"rank {rank}: {error.text}")
    line, said = _users_line(error.frames), f"{error.type}: {error.text}"
    parts = _findings(rank, f"rank {rank} {raised(said, line)} [{rules.raised.code}]", trace)
    parts += _raised_before(rank, error)
    if trace.info.replaced and (_is_consequence(error) or _NO_GROUP in error.text):
        parts.append(_GROUP_IS_OVER)
    parts += _of_nothing(error)
    text = "".join(_frame(*frame) for frame in _shown(error.frames))
    parts.append(f"\nTraceback on rank {rank}:\n{text}{said}")
    if error.cause:
        parts.append(f"caused by {error.cause}")
    return RankError("\n".join(parts), rank=rank, line=line, traceback=text)


#: A variable that is assigned something; and what returns nothing.
_ASSIGNED = re.compile(r"^\s*(\w+)\s*=(?!=)\s*(.*)")
_IN_PLACE = re.compile(
    r"(?:[\w.]+\.)?(all_reduce|broadcast|reduce|all_gather|all_gather_into_tensor|gather|scatter|"
    r"reduce_scatter|reduce_scatter_tensor|all_to_all|all_to_all_single|send)"
    r"\(([\w.\[\]]+)(?!.*async_op)"
)


def _of_nothing(error: Failure) -> list[str]:
    """The reason why a variable of the line that raised is None: a collective returned it."""
    where = next((f for f in reversed(error.frames) if is_users(f[0])), None)
    if where is None or "NoneType" not in error.text:
        return []
    file, number, *_ = where
    linecache.checkcache(file)
    return _why_none(linecache.getlines(file)[:number])


def of_returned(name: str, outcomes: Iterable[Outcome], trace: Trace) -> list[str]:
    """A remark on a function, or cell, that returns what a collective returned: None."""
    if any(o.result_type != "NoneType" for o in outcomes):
        return []
    for text in trace.info.sources.values():
        body = re.search(
            rf"^( *)def {re.escape(name)}\(.*\n((\1[ )].*\n|\s*\n)*)", f"{text}\n", re.M
        )
        source = body[2] if body is not None else text if text.startswith("%%ranks") else ""
        lines = source.rstrip().splitlines()
        last = re.match(r"\s*return +(.+)" if body is not None else r"(\w+)$", (lines or [""])[-1])
        if last is None:
            continue
        direct = _IN_PLACE.match(last[1])
        if said := [_in_place(*direct.groups())] if direct else _why_none(lines):
            return [f"{name} returned None: {said[0]}"]
    return []


def _why_none(lines: list[str]) -> list[str]:
    """The reason why a name in the last of these lines is None: a collective returned it."""
    unknown = set(re.findall(r"\w+", lines[-1])) if lines else set()
    for before in reversed(lines[:-1]):
        if before.lstrip().startswith(("def ", "async def ", "class ")):
            break
        assigned = _ASSIGNED.match(before)
        if assigned is None or assigned[1] not in unknown:
            continue
        unknown.remove(assigned[1])
        if found := _IN_PLACE.match(assigned[2]):
            return [f"{assigned[1]} is None: {_in_place(*found.groups())}"]
    return []


def _in_place(collective: str, tensor: str) -> str:
    """The place of the result of a collective, which returns None."""
    if collective == "send":
        return "send returns None when the transfer is over. isend returns a request to wait for."
    tensor = "gather_list" if collective == "gather" else tensor
    return f"{collective} returns None and leaves its result in {tensor}. Use {tensor}."


def _users_line(frames: list[Frame]) -> str:
    """The innermost line that is the user's: not in an installed package, nor of Cython's.

    A page of distkit counts only where there is no other: its caller can do something about it.
    """
    known = [
        (file, number)
        for file, number, function, _ in reversed(frames)
        if file and is_users(file) and "." not in function and not is_generated(file, function)
    ]
    known.sort(key=lambda line: line[0].startswith(OWN))
    if not (known or frames):
        return ""
    file, number = known[0] if known else frames[-1][:2]
    return place(f"{file}:{number}")


def _shown(frames: list[Frame]) -> list[Frame]:
    """The traceback without distkit's machinery, as far as the user's lines explain it."""
    return [
        f for f in frames if not (f[0].startswith(MACHINERY) or is_generated(f[0], f[2]))
    ] or frames


def _frame(file: str, number: int, function: str, text: str | None) -> str:
    """One frame of a remote traceback; cells' sources are known only here."""
    if not file:
        return f"  [{function}]\n"
    linecache.checkcache(file)  # a script may have been edited since its last run
    source = linecache.getline(file, number).strip() or (text or "")
    label, _, line = place(f"{file}:{number}").rpartition(":")
    shown = f'  File "{label}", line {line}, in {function}\n'
    return shown + (f"    {source}\n" if source else "")


def _crash_line(log: str) -> str:
    """The line that a rank died at, the innermost of the user's, if its log has a crash report."""
    for file, number in re.findall(r'File "(.+)", line (\d+) in ', log):
        if is_users(file):
            return place(f"{file}:{number}")
    return ""
