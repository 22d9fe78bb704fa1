"""A run gone through step by step as plain data: its moments, its sources, what can be done now.

The tensors of a moment are those of the timeline's bars: a moment names them by their ids. So
a step costs the browser a few hundred bytes, and looking back costs it nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from distkit.diagnosis.facts import standings
from distkit.diagnosis.findings import PAGES, Finding
from distkit.diagnosis.rank_state import Doing, RankState
from distkit.events import COMPUTATION, Event, Op, State
from distkit.trace.calls import at, wait_of
from distkit.trace.log import EventLog
from distkit.views.scene.frame import Json, clean
from distkit.views.scene.waits import waits
from distkit.views.timeline.columns import compact
from distkit.views.widget.live import Moment, Steppable

#: So many characters of a source file are shown.
MAX_SOURCE = 200_000

#: So many remarks are shown at once.
MAX_REMARKS = 3

#: Kinds of findings that say what the run's error says.
FAILURES = ("raised", "died", "unused_parameter")

#: Where an error begins to tell what only some want to read.
_TRACEBACK = re.compile(r"\n+(?=Traceback on rank |Its last words:)")
_MORE = re.compile(r"\n+(?=Other ranks that raised:|The others were released:)")

NOWHERE: Mapping[int, str] = MappingProxyType({})


class Stepping:
    """Projects the moments of a run, each when it is new, and tells what changed.

    Example:
        >>> Stepping().moments([], [])
        []
    """

    def __init__(self) -> None:
        self._seen: list[Moment] = []
        self._last: list[dict[int, str]] = []
        self._callers: dict[tuple[int, int], str] = {}  # where a page was called, by operation
        self._told: Json = {"sources": {}, "moments": []}

    def changes(self, run: Steppable, **more: Any) -> Json:
        """What is new since the last call: a patch for the browser, {} if nothing is."""
        now, reached = _now(run), list(run.moments)
        trace, told = run.trace, self._told  # asked last: it has the events of these moments
        patch = {k: v for k, v in {**now, **more}.items() if told.get(k) != v}
        sources = {
            clean(label): clean(text[:MAX_SOURCE])
            for label, text in trace.info.sources.items()
            if clean(label) not in told["sources"]
        }
        moments = self.moments(reached, trace.events, _ends(trace))
        told.update(patch)
        told["sources"].update(sources)
        return {
            **patch,
            **({"sources": sources} if sources else {}),
            **({"moments": moments} if moments else {}),
        }

    def moments(
        self, moments: Sequence[Moment], events: Sequence[Event], ends: Mapping[int, str] = NOWHERE
    ) -> list[list[Any]]:
        """The moments that are new or not what they were, as ``[number, moment]``.

        Args:
            moments: those so far.
            events: of the trace.
            ends: the lines at which ranks have failed.
        """
        known = self._seen
        first = next(
            (
                i
                for i, (a, b) in enumerate(zip(known, moments, strict=False))
                if a is not b and a != b
            ),
            min(len(known), len(moments)),
        )
        del self._last[first:], self._told["moments"][first:]
        self._seen = list(moments)
        for i in range(first, len(moments)):
            begin = moments[i - 1].events if i else 0
            last = dict(self._last[-1]) if i else {}
            new = events[begin : moments[i].events]
            last.update(_completed(new))
            self._last.append(last)
            self._callers |= {
                (e.rank, e.seq): e.attributes["caller"] for e in new if "caller" in e.attributes
            }
            ranks = [
                self._rank(s, last, events[: moments[i].events], ends) for s in moments[i].standings
            ]
            self._told["moments"].append(_moment(moments[i], ranks))
        return [[i, self._told["moments"][i]] for i in range(first, len(moments))]

    def _rank(
        self,
        s: RankState,
        last: Mapping[int, str],
        events: Sequence[Event],
        ends: Mapping[int, str],
    ) -> Json:
        """A rank in a moment; in a page of distkit's own it is at the line that called it."""
        where = _line(s, events, ends)
        caller = "" if s.seq is None else self._callers.get((s.rank, s.seq), "")
        return compact(
            rank=s.rank,
            doing=str(s.doing),
            words=clean(str(s)),
            call=clean(wait_of(s) or s.call()),
            where=clean(caller or where),
            inner=clean(where) if caller else None,
            reason=clean(s.reason),
            waits=list(s.waits_for),
            now=None if s.seq is None else f"{s.rank}.{s.seq}",
            last=last.get(s.rank),
        )

    def snapshot(self) -> Json:
        """Everything told so far."""
        moments = [[i, m] for i, m in enumerate(self._told["moments"])]
        return {**self._told, "sources": dict(self._told["sources"]), "moments": moments}


def _now(run: Steppable) -> Json:
    """All but the moments and the sources."""
    hangs = any(f.hang for f in run.findings)
    stopped = run.trace.info.interrupted and not hangs  # its error says no more
    return {
        "name": clean(run.name),
        "ranks": list(run.ranks),
        "position": run.position,
        "playing": run.playing,
        "finished": run.finished,
        "stopped": stopped,
        "remarks": _shown(run, "" if stopped else run.error),
        "pages": PAGES,
    }


def _shown(run: Steppable, error: str) -> list[Json]:
    """What is wrong at the moment shown: now all that is known, else a circle of waiting ranks."""
    found = remarks(error, run.findings)
    if run.position == len(run.moments) - 1 and found:
        graph = waits(standings(run.trace)) if any(r["hang"] for r in found) else None
        return [{**found[0], "graph": graph}, *found[1:]]
    states = run.moments[run.position].standings
    circle = in_a_circle(states)
    one = {
        "message": clean(sentence(circle)),
        "remedy": "",
        "hang": True,
        "lines": {str(s.rank): clean(s.where) for s in circle},
        "graph": waits(states),
    }
    return [one] if circle else []


def _ends(trace: EventLog) -> dict[int, str]:
    """The lines at which ranks have failed."""
    return {rank: end.where for rank, end in trace.info.ends.items() if end.where}


def remarks(error: str, findings: Sequence[Finding]) -> list[Json]:
    """What is wrong, each thing once: the run's error, and what a diagnosis found besides.

    Findings that the error repeats give it their lines, and a remedy if it has none.
    """
    failures = [f for f in findings if f.kind in FAILURES]
    repeated = [f for f in findings if f.kind in FAILURES or f.message in error]
    if not error or (repeated and not failures):
        return [_finding(f) for f in findings[:MAX_REMARKS]]
    others = [f for f in findings if f not in repeated]
    return [_failure(error, repeated), *map(_finding, others[: MAX_REMARKS - 1])]


def _failure(error: str, findings: Sequence[Finding]) -> Json:
    """The error of a run; its traceback apart from the rest."""
    said, *traceback = _TRACEBACK.split(error, maxsplit=1)
    message, *more = _MORE.split(said.strip(), maxsplit=1)
    remedy = findings[0].remedy if findings and findings[0].kind != "died" else ""  # it has one
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
    """Rank and id of each operation on a tensor that completed: the last one counts.

    What was received counts more than what was sent meanwhile.
    """
    done = [e for e in events if e.state is State.COMPLETED and e.op not in COMPUTATION and e.dtype]
    done.sort(key=lambda e: e.op is not Op.SEND)
    return ((e.rank, f"{e.rank}.{e.seq}") for e in done)


def _moment(moment: Moment, ranks: list[Json]) -> Json:
    return compact(time=round(moment.time, 7), choice=list(moment.choice), ranks=ranks)


def _line(s: RankState, events: Sequence[Event], ends: Mapping[int, str]) -> str:
    """Where a rank is; one that has ended too early stays at its last line."""
    if s.doing is Doing.FAILED and s.rank in ends:
        return ends[s.rank]
    if wait_of(s):
        return str(s.attributes["waits_at"])
    if s.where or s.doing not in (Doing.FAILED, Doing.RELEASED):
        return s.where
    return next((e.where for e in reversed(events) if e.rank == s.rank and e.where), "")


def in_a_circle(standings: Sequence[RankState]) -> list[RankState]:
    """Blocked ranks of which each waits for the next, and the last for the first; [] if none."""
    blocked = {
        s.rank: s
        for s in standings
        if s.doing is Doing.BLOCKED and (s.op is not Op.RECV or s.peer is not None)
    }
    for start in blocked:
        path: list[int] = []
        rank: int | None = start
        while rank is not None and rank not in path:
            path.append(rank)
            rank = next((r for r in blocked[rank].waits_for if r in blocked), None)
        if rank is not None:
            return [blocked[r] for r in path[path.index(rank) :]]
    return []


def sentence(circle: Sequence[RankState]) -> str:
    """A circle of waiting ranks in words."""
    waits = [f"rank {s.rank} waits in {s.call()}{at(s.where)}" for s in circle]
    other = "other" if len(circle) == 2 else "next"
    return f"{', '.join(waits)}: each waits for the {other}." if waits else ""
