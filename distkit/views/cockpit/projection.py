"""Projects a stepped run to plain data: the moment shown, the sources, and the run's state.

The browser receives one moment. Its tensors are those of the timeline's bars, referenced by id.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from distkit.diagnosis.facts import rank_states
from distkit.diagnosis.findings import PAGES, Finding
from distkit.diagnosis.rank_state import RankState, RankStatus
from distkit.events import COMPUTATION, Event, Op, State
from distkit.trace.calls import wait_of
from distkit.views.scene.frame import Json, clean
from distkit.views.scene.waits import waits
from distkit.views.timeline.columns import compact
from distkit.views.widget.live import Steppable

#: Maximum length of a source file [characters], and maximum number of remarks shown.
MAX_SOURCE, MAX_REMARKS = 200_000, 3

#: Kinds of findings that repeat the run's error.
FAILURES = ("raised", "died", "unused_parameter")

#: Start of the detailed parts of an error message.
_TRACEBACK = re.compile(r"\n+(?=Traceback on rank |Its last output:)")
_MORE = re.compile(r"\n+(?=Other ranks that raised:|The others were stopped:)")


def project(run: Steppable, command_error: str = "") -> Json:
    """Return the moment shown, the state of the run, and its sources.

    Args:
        run: the run.
        command_error: why the last command failed, if it did.
    """
    moments = list(run.moments)
    trace = run.trace  # read last: it has the events of these moments
    last = len(moments) - 1
    position = min(run.position, last)
    moment = moments[position]
    events = trace.events[: moment.events]
    ends = {rank: end.where for rank, end in trace.info.ends.items() if end.where}
    completed = dict[int, str]()
    for begin, end in pairwise([0, *(m.events for m in moments[: position + 1])]):
        completed |= _completed(events[begin:end])
    callers = {(e.rank, e.seq): e.attributes["caller"] for e in events if "caller" in e.attributes}
    hang = any(f.hang for f in run.findings)
    stopped = trace.info.interrupted and not hang  # the error would only report the stop
    at_end, error = position == last, "" if stopped else run.error
    return {
        "name": clean(run.name),
        "ranks": list(run.ranks),
        "position": position,
        "last": last,
        "moment": {
            "time": round(moment.time, 7),
            "choice": list(moment.choice),
            "ranks": [_rank(s, completed, callers, events, ends) for s in moment.rank_states],
        },
        "rank_states": [
            {"rank": s.rank, "status": str(s.status), "words": clean(str(s))}
            for s in moments[last].rank_states
        ],
        "playing": run.playing,
        "finished": run.finished,
        "stopped": stopped,
        "remarks": _current_remarks(run, error) if at_end else [],
        "pages": PAGES,
        "error": command_error,
        "sources": {clean(k): clean(text[:MAX_SOURCE]) for k, text in trace.info.sources.items()},
    }


def _rank(
    s: RankState,
    completed: Mapping[int, str],
    callers: Mapping[tuple[int, int], str],
    events: Sequence[Event],
    ends: Mapping[int, str],
) -> Json:
    """Return the state of a rank; inside distkit's algorithms its line is the caller's."""
    where, e = _line(s, events, ends), s.event
    caller = "" if e is None else callers.get((e.rank, e.seq), "")
    return compact(
        rank=s.rank,
        status=str(s.status),
        words=clean(str(s)),
        call=clean("" if e is None else wait_of(e) or s.call()),
        scheduled=(e is not None and e.state is State.SCHEDULED) or None,  # not entered
        where=clean(caller or where),
        inner=clean(where) if caller else None,
        reason=clean(s.reason),
        waits=list(s.waits_for),
        now=None if e is None else f"{e.rank}.{e.seq}",
        last=completed.get(s.rank),
    )


def _current_remarks(run: Steppable, error: str) -> list[Json]:
    """Return the remarks for the latest moment."""
    result = remarks(error, run.findings)
    if any(r["hang"] for r in result):
        result[0]["graph"] = waits(rank_states(run.trace))
    return result


def remarks(error: str, findings: Sequence[Finding]) -> list[Json]:
    """Return the run's error and the findings of the diagnosis, without repetitions.

    Findings that repeat the error add their lines to it, and a remedy if it has none.
    """
    failures = [f for f in findings if f.kind in FAILURES]
    repeated = [f for f in findings if f.kind in FAILURES or f.message in error]
    if not error or (repeated and not failures):
        return [_finding(f) for f in findings[:MAX_REMARKS]]
    others = [f for f in findings if f not in repeated]
    return [_failure(error, repeated), *map(_finding, others[: MAX_REMARKS - 1])]


def _failure(error: str, findings: Sequence[Finding]) -> Json:
    """Return the error of a run, separate from its traceback."""
    text, *traceback = _TRACEBACK.split(error, maxsplit=1)
    message, *more = _MORE.split(text.strip(), maxsplit=1)
    # the error of a dead rank already has a remedy
    remedy = findings[0].remedy if findings and findings[0].kind != "died" else ""
    return {
        "message": clean(message),
        "more": clean("".join(more)),
        "traceback": clean("".join(traceback).strip("\n")),
        "hang": True,
        "remedy": "" if remedy.lower() in error.lower() else clean(remedy),
        "lines": {str(rank): clean(where) for f in findings for rank, where in f.lines.items()},
    }


def _finding(f: Finding) -> Json:
    return {
        "message": clean(f.message),
        "remedy": clean(f"{f.remedy} [{f.code}]"),
        "hang": f.hang,
        "lines": {str(rank): clean(where) for rank, where in f.lines.items()},
    }


def _completed(events: Iterable[Event]) -> Iterable[tuple[int, str]]:
    """Return rank and id of each completed tensor operation; the last one of a rank is shown.

    Sends are first, so that received tensors take precedence.
    """
    completed = [
        e for e in events if e.state is State.COMPLETED and e.op not in COMPUTATION and e.dtype
    ]
    completed.sort(key=lambda e: e.op is not Op.SEND)
    return ((e.rank, f"{e.rank}.{e.seq}") for e in completed)


def _line(s: RankState, events: Sequence[Event], ends: Mapping[int, str]) -> str:
    """Return a rank's line; for a rank that failed or was stopped, this is its last line."""
    if s.status is RankStatus.FAILED and s.rank in ends:
        return ends[s.rank]
    if s.event is not None and wait_of(s.event):
        return str(s.event.attributes["waits_at"])
    if s.where or s.status not in (RankStatus.FAILED, RankStatus.STOPPED, RankStatus.DIED):
        return s.where
    return next((e.where for e in reversed(events) if e.rank == s.rank and e.where), "")
