"""Projects a run onto the stage: positions, links, keyframes and the contents of tensors.

No side effects.

A *keyframe* is a message or a collective. The members of a collective send to a hub in the middle
and receive the result from it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from distkit._format import count, human_bytes, human_seconds
from distkit.events import COLLECTIVES, REQUESTS, Op, Span, State
from distkit.trace.info import hosts_if_several
from distkit.trace.log import EventLog, grouped
from distkit.views.scene.frame import Json, applicable, clean, dotted, facts, name, omissions
from distkit.views.scene.renderer import thinned
from distkit.views.stage.contributions import (
    MAX_RANKS,
    Change,
    Contributions,
    Key,
    Payload,
    trace_contributions,
)

Pair = tuple[int, int]
Point = tuple[float, float]
#: At most MAX_CALLS calls, MAX_DRAWN_RANKS ranks and MAX_PANELS panels are drawn.
MAX_CALLS, MAX_DRAWN_RANKS, MAX_PANELS = 8_000, 256, 6
#: Duration of a message as a fraction of a round; it arrives at the end of the round.
FLIGHT_TIME = 0.85
NOTHING = Payload()
NO_MESSAGES = "this trace has no messages and no collectives"


@dataclass(frozen=True, slots=True)
class Keyframe:
    """A message or collective: its senders with their starts, its receivers with their ends [s].

    ``meeting_time`` is the time when the members of a collective meet; None for a message.
    ``members_receive`` is True if members receive from the ``root`` or from each other, and False
    if only the root receives. ``calls`` are the participating calls.
    """

    op: str
    senders: tuple[int, ...]
    receivers: tuple[int, ...]
    starts: tuple[float, ...]
    ends: tuple[float | None, ...]
    calls: tuple[Key | None, ...]
    nbytes: int
    label: str
    where: str
    sent: bool = True
    meeting_time: float | None = None
    root: int | None = None
    members_receive: bool = True
    payload: Payload = NOTHING
    round: int = 0

    @property
    def begin(self) -> float:
        """Time of the first send."""
        return min(self.starts)

    @property
    def end(self) -> float | None:
        """Time of the last receive; None if any receive never finished."""
        ends = [end for end in self.ends if end is not None]
        return max(ends) if len(ends) == len(self.ends) else None

    def in_rounds(self) -> Keyframe:
        """Return the keyframe with times in rounds."""
        begin, end = self.round + 1 - FLIGHT_TIME, self.round + 1.0
        return replace(
            self,
            starts=(begin,) * len(self.starts),
            ends=tuple(None if e is None else end for e in self.ends),
            meeting_time=None if self.meeting_time is None else (begin + end) / 2,
        )


@dataclass(frozen=True)
class Stage:
    """The data needed to draw a run.

    ``sent`` contains the pairs of drawn ranks that communicate, sender first. ``rounds`` contains
    the keyframes of each round, with times in seconds; rounds in which nothing arrives are last.
    ``changes`` have times in rounds. ``frame`` contains the fields of the picture except its scene.
    """

    names: dict[int, str]
    hosts: dict[int, str]
    positions: dict[int, Point]
    sent: set[Pair]
    rounds: list[list[Keyframe]]
    changes: list[tuple[float, Change]]
    frame: Json


def project(trace: EventLog, live: bool = False, max_calls: int = MAX_CALLS) -> Stage:
    """Return the stage of a run.

    Args:
        trace: the run.
        live: whether the run is in progress.
        max_calls: maximum number of calls in the drawn keyframes; a note states how many are drawn.

    >>> project(EventLog()).rounds
    []
    """
    info, ranks = trace.info, trace.ranks[:MAX_DRAWN_RANKS]
    sent = {(m.src, m.dst) for m in trace.messages if m.sent is not None and m.src != m.dst}
    hosts = {rank: clean(host) for rank, host in hosts_if_several(info).items() if rank in ranks}
    contributions, positions = trace_contributions(trace), arrange(ranks, hosts)
    numbered = _number([*_messages(trace, contributions), *_collectives(trace)], contributions)
    calls = accumulate(min(len(keyframe.calls), MAX_DRAWN_RANKS) for keyframe in numbered)
    keyframes = [keyframe for keyframe, n in zip(numbered, calls, strict=True) if n <= max_calls]
    names, rounds = {rank: name(info, rank) for rank in ranks}, _rounds(keyframes)
    waiting = "waiting for the first operation" if live else NO_MESSAGES
    frame = {
        "title": clean(info.name) or "Stage",
        "view": "stage",
        "facts": facts(info, len(trace.ranks)),
        "notices": [] if live else _warnings(trace, keyframes),
        "notes": omissions(
            ("messages and collectives are drawn", len(keyframes), len(numbered)),
            ("ranks are drawn", len(ranks), len(trace.ranks)),
        ),
        "description": _certainty(trace, contributions),
        "live": live,
        "empty": "" if rounds else waiting,
        "panels": _panels(rounds, names, trace.start),
        "unit": "round",
        "end": 1.0 + max((members[0].round for members in rounds), default=-1),
        "opening": 0.0,
        "keyframes": [_round_as_keyframe(members, names) for members in rounds],
    }
    drawn = {pair for pair in sent if positions.keys() >= set(pair)}
    return Stage(names, hosts, positions, drawn, rounds, _changes(contributions, keyframes), frame)


# -- positions ------------------------------------------------------------------------------


def arrange(ranks: Sequence[int], hosts: Mapping[int, str]) -> dict[int, Point]:
    """Return the position of every rank, x and y in [0, 1].

    The ranks of each host form a row. With only one host, or only one rank per host, the ranks form
    a circle.

    Args:
        ranks: all ranks.
        hosts: host names by rank, if there are several.

    >>> arrange([0, 1, 2, 3], {})[0]
    (0.5, 0.0)
    """
    rows = [*grouped(ranks, hosts.get).values()]
    return _rows(rows) if 1 < len(rows) < len(ranks) else _circle(ranks)


def _circle(ranks: Sequence[int]) -> dict[int, Point]:
    """Place the ranks clockwise from the top, and two ranks side by side."""
    n, first = len(ranks), math.pi if len(ranks) == 2 else -math.pi / 2
    angles = [first + 2 * math.pi * i / n for i in range(n)]
    return {
        rank: (round(0.5 + math.cos(angle) / 2, 4), round(0.5 + math.sin(angle) / 2, 4))
        for rank, angle in zip(ranks, angles, strict=True)
    }


def _rows(rows: Sequence[Sequence[int]]) -> dict[int, Point]:
    """Place centered rows from top to bottom, with equal distances between ranks."""
    longest = max(map(len, rows))
    return {
        rank: (
            round(0.5 + (i - (len(row) - 1) / 2) / max(longest - 1, 1), 4),
            round(y / (len(rows) - 1), 4),
        )
        for y, row in enumerate(rows)
        for i, rank in enumerate(row)
    }


# -- keyframes ------------------------------------------------------------------------------


def _messages(trace: EventLog, contributions: Contributions) -> Iterator[Keyframe]:
    spans = {(s.rank, s.seq): s for s in trace.spans}
    for m in trace.messages:
        span = spans[m.send or m.recv or (-1, -1)]
        begin = span.start if m.sent is None else m.sent
        yield Keyframe(
            op=str(m.op),
            senders=(m.src,),
            receivers=(m.dst,),
            starts=(begin,),
            ends=(None if m.sent is None or m.received is None else max(m.received, begin),),
            calls=(m.send, m.recv),
            nbytes=m.nbytes,
            label=clean(m.label),
            where=_line(span),
            sent=m.sent is not None,
            payload=contributions.payload.get(m.send or (-1, -1), NOTHING),
        )


def _line(s: Span) -> str:
    return clean(s.where.rpartition("/")[2])


def _collectives(trace: EventLog) -> Iterator[Keyframe]:
    """Yield the collectives; their members meet between the last arrival and the first exit."""
    started = (s for s in trace.spans if s.op in COLLECTIVES and s.state is not State.SCHEDULED)
    for spans in trace.grouped_by_match(started):
        members = sorted(spans, key=lambda s: s.rank)
        first, ranks = members[0], tuple(s.rank for s in members)
        ends, last = [s.end for s in members if s.end is not None], max(s.start for s in members)
        yield Keyframe(
            op=" / ".join(sorted({str(s.op) for s in members})),
            senders=ranks,
            receivers=ranks,
            starts=tuple(s.start for s in members),
            ends=tuple(s.end for s in members),
            calls=tuple((s.rank, s.seq) for s in members),
            nbytes=max(s.nbytes for s in members),
            label=clean(first.label),
            where=_line(first),
            meeting_time=(last + min(ends)) / 2 if ends and min(ends) > last else last,
            root=first.peer
            if first.op in (Op.BROADCAST, Op.REDUCE, Op.GATHER, Op.SCATTER)
            else None,
            members_receive=first.op not in (Op.REDUCE, Op.GATHER),
        )


def _number(keyframes: list[Keyframe], contributions: Contributions) -> list[Keyframe]:
    """Return the keyframes sorted by end, with their rounds.

    The round of a keyframe follows the latest round of its senders. The messages of an all-reduce
    have the rounds of its schedule.
    """
    first_rounds: dict[int, int] = {}  # first round of each all-reduce
    latest: dict[int, int] = defaultdict(lambda: -1)  # latest round of each rank
    numbers: dict[int, int] = {}
    begins = [(keyframe.begin, True, i) for i, keyframe in enumerate(keyframes)]
    ends = [(b.end, False, i) for i, b in enumerate(keyframes) if b.end not in (None, b.begin)]
    for time, begins_now, i in sorted([*begins, *ends]):
        keyframe, payload = keyframes[i], keyframes[i].payload
        if begins_now:
            all_reduce = payload.all_reduce
            senders = (
                keyframe.senders
                if all_reduce is None
                else contributions.all_reduces[all_reduce].members
            )
            number = 1 + max(latest[r] for r in senders)
            if all_reduce is not None:
                number = first_rounds.setdefault(all_reduce, number) + payload.round
            numbers[i] = number
            latest |= dict.fromkeys(keyframe.senders, number)
        if keyframe.end == time:
            latest |= {r: max(latest[r], numbers[i]) for r in keyframe.receivers}
    numbered = [replace(keyframe, round=numbers[i]) for i, keyframe in enumerate(keyframes)]
    return sorted(numbered, key=lambda b: (b.end is None, b.end or b.begin, b.begin))


def _changes(contributions: Contributions, keyframes: list[Keyframe]) -> list[tuple[float, Change]]:
    """Return each change with its time in rounds, if its keyframe is drawn."""
    rounds = {call: keyframe.round for keyframe in keyframes for call in keyframe.calls}
    changes = [
        (rounds[c.by] + 1.0 if c.after else _begin(rounds[c.by]), c)
        for c in contributions.changes
        if c.by in rounds
    ]
    return sorted(changes, key=lambda change: change[0])


def _begin(number: int) -> float:
    """Return the time at which a round's senders change their tensors [rounds]; 0 in round 0."""
    return number + 1 - FLIGHT_TIME if number else 0.0


# -- text ------------------------------------------------------------------------------


def _certainty(trace: EventLog, contributions: Contributions) -> str:
    """Return a sentence that explains the strips and the certainty of the contributions."""
    if len(trace.ranks) > MAX_RANKS:
        return f"Contributions are traced for at most {MAX_RANKS} ranks."
    pieces = [piece for change in contributions.changes for piece in change.pieces]
    if not any(piece.certain or piece.possible for piece in pieces):
        served = any(s.op in REQUESTS for s in trace.spans)
        return "The trace does not record a server's computation." if served else ""
    explanation = (
        "Each strip is a rank's tensor, in numbered chunks. A chunk has a layer in the color of "
        "each rank whose contribution it contains."
    )
    doubt = " Pale: at most these ranks have contributed; the trace does not record computations."
    return explanation + doubt * any(piece.possible for piece in pieces)


def _warnings(trace: EventLog, keyframes: list[Keyframe]) -> list[str]:
    open_ = [b for b in keyframes if b.end is None]
    lost = [b for b in open_ if b.meeting_time is None]
    unsent = sum(not b.sent for b in lost)
    stuck, dropped = len(open_) - len(lost), trace.dropped
    return applicable(
        (f"{count(len(lost) - unsent, 'message')} not received", len(lost) > unsent),
        (f"{count(unsent, 'receive')} without a message", unsent),
        (f"{count(stuck, 'collective')} not finished", stuck),
        (f"{count(dropped, 'event')} dropped: the recorder's buffer was full", dropped),
    )


def participants(keyframe: Keyframe, names: Mapping[int, str]) -> str:
    """Return the operation and participants of a keyframe as text; "send" is left out."""
    ranks = [
        names.get(r, f"rank {r}") for r in dict.fromkeys(keyframe.senders + keyframe.receivers)
    ]
    if keyframe.meeting_time is None:
        op = "" if keyframe.op == "send" else f"{keyframe.op} "
        return f"{op}{ranks[0]} → {ranks[-1]}"
    if len(ranks) == len(names):
        return keyframe.op
    members = ", ".join(ranks) if len(ranks) < 5 else f"{ranks[0]} … {ranks[-1]} ({len(ranks)})"
    return f"{keyframe.op} of {members}"


def details_of(keyframe: Keyframe) -> list[str]:
    """Return a keyframe's details: chunks, effect, root, size, and whether it is unfinished."""
    payload, missing = keyframe.payload, "not received" if keyframe.sent else "not sent"
    return applicable(
        (f"{'chunk' if payload.count == 1 else 'chunks'} {payload.chunks}", payload.at is not None),
        ("added" if payload.reduce else "replaced", payload.reduce is not None),
        (f"root {keyframe.root}", keyframe.root is not None),
        (human_bytes(keyframe.nbytes), keyframe.nbytes),
        (missing if keyframe.meeting_time is None else "not finished", keyframe.end is None),
    )


# -- rounds ----------------------------------------------------------------------------


def _rounds(keyframes: list[Keyframe]) -> list[list[Keyframe]]:
    """Group the keyframes by round; rounds in which nothing arrives are last."""
    rounds = grouped(keyframes, lambda keyframe: keyframe.round)
    lost = {n for n, members in rounds.items() if all(k.end is None for k in members)}
    return [rounds[n] for n in sorted(rounds, key=lambda n: (n in lost, n))]


def _round_as_keyframe(keyframes: Sequence[Keyframe], names: Mapping[int, str]) -> Json:
    """Return a round as a keyframe of the picture, with its caption, details and line."""
    first = keyframes[0]
    end = first.round + 1.0
    lines = {keyframe.where for keyframe in keyframes}
    texts = _common(keyframes)
    if len(keyframes) == 1:
        duration = "" if first.end is None else human_seconds(first.end - first.begin)
        label = "" if first.op == "send" else first.label
        texts = [participants(first, names), *details_of(first), label, duration]
    return {
        "begin": end - FLIGHT_TIME,
        "end": end if any(keyframe.end is not None for keyframe in keyframes) else None,
        "caption": texts[0],
        "details": dotted(texts[1:]),
        "where": lines.pop() if len(lines) == 1 else "",
    }


def _panels(
    rounds: Sequence[Sequence[Keyframe]], names: Mapping[int, str], start: float
) -> list[list[object]]:
    """Return the keyframe (-1: the start), title and end time of each panel.

    The panels are the start and all rounds, or a few evenly spaced rounds. The run begins at
    ``start`` [s].
    """
    short = {rank: name.removeprefix("rank ") for rank, name in names.items()}
    result, latest = list[list[object]]([[-1, "before", ""]]), start
    for i, keyframes in enumerate(rounds):
        latest = max(latest, *(b.end or b.begin for b in keyframes))
        label = f"round {keyframes[0].round + 1} of {len(rounds)}"
        title = participants(keyframes[0], short) if len(keyframes) == 1 else label
        result.append([i, title, human_seconds(latest - start)])
    return result if len(result) <= MAX_PANELS else thinned(result[1:], MAX_PANELS)


def _common(keyframes: Sequence[Keyframe]) -> list[str]:
    """Describe what several keyframes have in common."""
    messages, sizes = sum(b.meeting_time is None for b in keyframes), {b.nbytes for b in keyframes}
    effects, (size, *others) = {b.payload.reduce for b in keyframes}, sizes
    return applicable(
        (count(messages, "message"), messages),
        (count(len(keyframes) - messages, "collective"), messages < len(keyframes)),
        (f"{human_bytes(size)} each", size and not others),
        ("the chunks are added", effects == {True}),
        ("the chunks replace the previous ones", effects == {False}),
    )
