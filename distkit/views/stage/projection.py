"""The stage as plain data: places, links, keyframes, and what the ranks hold.

A *keyframe* is a message, or a collective, whose members send to a hub in the middle and get its
outcome from there. Both painters draw this.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from distkit._format import count, human_bytes, human_seconds
from distkit.events import COLLECTIVES, REQUESTS, Op, Span, State
from distkit.trace.hosts import several
from distkit.trace.info import RunInfo
from distkit.trace.log import EventLog
from distkit.views.scene.frame import Json, clean, name
from distkit.views.scene.painter import thinned
from distkit.views.scene.summaries import headline, number
from distkit.views.stage.contributions import MAX_RANKS, Cargo, Contributions, Piece, Ring, follow
from distkit.views.stage.layout import KINDS, Pair, arrange, pattern

#: The largest numbers of drawn keyframes, links and ranks; a notice names the rest.
MAX_KEYFRAMES, MAX_LINKS, MAX_PLACES = 2_000, 4_000, 1_024
#: The largest numbers of drawn values of a chunk, and of changes of tensors.
MAX_VALUES, MAX_CHANGES = 16, 20_000
#: Measured time, or rounds, which show all their messages at once.
CLOCKS = ("time", "rounds")
#: Arrangements with another name beside the title.
WORDS = {"roles": "workers and servers", "hosts": "by host"}
#: The part of a round that a message takes; it arrives at the end.
FLIGHT = 0.85


def project(
    trace: EventLog,
    layout: str | None = None,
    live: bool = False,
    clock: str = "rounds",
    most: int = MAX_KEYFRAMES,
) -> Json:
    """The stage of a run.

    Args:
        trace: the run.
        layout: one of ``KINDS``; None to choose by the messages.
        live: whether the run goes on.
        clock: what time is at first: one of ``CLOCKS``.
        most: the largest number of drawn keyframes; a notice names the rest.

    Raises:
        ValueError: there is no such layout or clock.

    >>> project(EventLog())["keyframes"]
    []
    """
    if layout is not None and layout not in KINDS:
        raise ValueError(f"there is no layout {layout!r}. Choose one of {', '.join(KINDS)}.")
    if clock not in CLOCKS:
        raise ValueError(f"there is no clock {clock!r}. Choose one of {', '.join(CLOCKS)}.")
    sent = [(m.src, m.dst) for m in trace.messages if m.sent is not None]
    roles = {rank: known.role for rank, known in trace.info.ranks.items()}
    hosts = several(trace.info)
    ranks = trace.ranks[:MAX_PLACES]
    kind = layout or pattern(ranks, sent, roles, hosts)
    found = follow(trace)
    keyframes, more = _keyframes(trace, found, most)
    head = headline(trace)
    if sent or kind == "hosts":
        head["facts"].append(WORDS.get(kind, kind))
    return {
        **head,
        **({"notices": [], "notes": []} if live else _notices(trace, keyframes, more)),
        "said": _said(trace, found),
        "live": live,
        "kind": kind,
        "start": trace.start,
        "end": trace[-1].time if len(trace) else 0.0,
        "nodes": _nodes(ranks, trace.info, kind, sent, roles, hosts),
        "links": _links(ranks, sent),
        "keyframes": keyframes,
        "changes": _changes(found, keyframes, more),
        "clock": clock,
        "known": found.known,
        "doubtful": found.doubtful,
    }


def _nodes(
    ranks: list[int],
    info: RunInfo,
    kind: str,
    sent: Sequence[Pair],
    roles: dict[int, str],
    hosts: dict[int, str],
) -> list[Json]:
    places = arrange(kind, ranks, sent, roles, hosts)
    return [
        {
            "rank": rank,
            "name": name(info, rank),
            "role": roles.get(rank, ""),
            **({"host": clean(hosts[rank])} if rank in hosts else {}),
            "x": places[rank][0],
            "y": places[rank][1],
        }
        for rank in ranks
    ]


def _links(ranks: list[int], sent: Iterable[Pair]) -> list[list[int]]:
    """Each pair of communicating ranks, with the number of messages each way."""
    there, here = Counter(sent), set(ranks)
    pairs = {(min(p), max(p)) for p in there if p[0] != p[1] and here.issuperset(p)}
    return [[a, b, there[a, b], there[b, a]] for a, b in sorted(pairs)][:MAX_LINKS]


# -- keyframes ------------------------------------------------------------------------------


def _keyframes(trace: EventLog, found: Contributions, most: int) -> tuple[list[Json], int]:
    """The keyframes in the order of their ends, and the number of those left out."""
    spans = {(s.rank, s.seq): s for s in trace.spans}
    keyframes = [*_messages(trace, spans, found), *_collectives(trace)]
    keyframes.sort(key=lambda b: (b["end"] is None, b["end"] or b["begin"], b["begin"]))
    _number(keyframes, found.rings)
    return keyframes[:most], max(0, len(keyframes) - most)


def _messages(
    trace: EventLog, spans: dict[tuple[int, int], Span], found: Contributions
) -> list[Json]:
    keyframes = []
    for m in trace.messages:
        one = spans.get(m.send or (-1, -1)) or spans.get(m.recv or (-1, -1))
        begin = m.sent if m.sent is not None else one.start if one else None
        if begin is None:
            continue
        end = m.received if m.sent is not None else None
        keyframes.append(
            {
                "op": str(m.op),
                "src": m.src,
                "dst": m.dst,
                "begin": begin,
                "end": None if end is None else max(end, begin),
                "sent": m.sent is not None,
                "nbytes": m.nbytes,
                "label": clean(m.label),
                "where": clean((one.where if one else "").rpartition("/")[2]),
                **_cargo(found.cargo.get(m.send or (-1, -1)), one),
            }
        )
    return keyframes


def _cargo(cargo: Cargo | None, span: Span | None) -> Json:
    summary = span and (span.before or span.after)
    if cargo is None:
        return {"piece": _piece(Piece(values=summary.values))} if summary else {}
    if cargo.at is None:
        return {"piece": _piece(cargo.piece)}
    words = {"at": cargo.at, "of": cargo.of, "reduce": cargo.reduce}
    known = {k: v for k, v in words.items() if v is not None}
    return {"piece": _piece(cargo.piece), **known, "part": (cargo.ring, cargo.round)}


def _collectives(trace: EventLog) -> list[Json]:
    begun = (s for s in trace.spans if s.op in COLLECTIVES and s.state is not State.SCHEDULED)
    ties = trace.together(begun)
    return [_collective(sorted(members, key=lambda s: s.rank)) for members in ties]


def _collective(members: list[Span]) -> Json:
    """A collective: members go to the hub, meet when the last has arrived, and go back."""
    starts, ends = [s.start for s in members], [s.end for s in members]
    done = [end for end in ends if end is not None]
    whole = len(done) == len(members)
    last = max(starts)
    meet = (last + min(done)) / 2 if done and min(done) > last else last
    one = members[0]
    return {
        "op": " / ".join(sorted({str(s.op) for s in members})),
        "members": [s.rank for s in members],
        "starts": starts,
        "ends": ends,
        "meet": meet,
        "begin": min(starts),
        "end": max(done) if whole else None,
        "sent": True,
        "root": one.peer if one.op in _ROOTED else None,
        "gives": str(one.op) not in _GATHERING,
        "nbytes": max(s.nbytes for s in members),
        "label": clean(one.label),
        "where": clean(one.where.rpartition("/")[2]),
    }


_ROOTED = (Op.BROADCAST, Op.REDUCE, Op.GATHER, Op.SCATTER)
_GATHERING = ("reduce", "gather")


def _number(keyframes: list[Json], rings: Sequence[Ring]) -> None:
    """Number the keyframes by rounds: each follows its sender's earlier messages.

    Messages of a ring have the rounds of its schedule.
    """
    first: dict[int, int] = {}
    heard: dict[int, list[tuple[float, int]]] = defaultdict(list)
    spoke: dict[int, int] = {}
    for keyframe in sorted(keyframes, key=lambda b: float(b["begin"])):
        ring, step = keyframe.pop("part", (None, 0))
        senders = keyframe.get("members") or [keyframe["src"]]
        senders = senders if ring is None else rings[ring].members
        before = [n for r in senders for end, n in heard[r] if end <= keyframe["begin"]]
        before += [spoke[r] for r in senders if r in spoke]
        keyframe["round"] = 1 + max(before, default=-1)
        if ring is not None:
            keyframe["round"] = first.setdefault(ring, keyframe["round"]) + step
        spoke.update(dict.fromkeys(keyframe.get("members") or [keyframe["src"]], keyframe["round"]))
        if keyframe["end"] is not None:
            for r in keyframe.get("members") or [keyframe["dst"]]:
                heard[r] = [*heard[r][-3:], (keyframe["end"], keyframe["round"])]


# -- what ranks hold ----------------------------------------------------------------------


def _changes(found: Contributions, keyframes: list[Json], more: int) -> list[Json]:
    """Each change with its time and its step on the clock of rounds.

    Not those after the last keyframe where there are more.
    """
    steps = _Steps(keyframes)
    last = keyframes[-1]["end"] if more and keyframes else None
    until = math.inf if last is None else last
    return [
        {
            "time": c.time,
            "step": steps.at(c.rank, c.time),
            "rank": c.rank,
            "pieces": [_piece(p) for p in c.pieces],
            **({} if c.at is None else {"at": c.at}),
        }
        for c in found.changes[:MAX_CHANGES]
        if c.time <= until
    ]


class _Steps:
    """Maps measured times of each rank to the clock of rounds."""

    def __init__(self, keyframes: list[Json]) -> None:
        self.known: dict[tuple[int, float | None], float] = {}
        self.begins: dict[int, list[tuple[float, float]]] = defaultdict(list)
        for keyframe in keyframes:
            ranks = keyframe.get("members") or [keyframe["src"]]
            begins = keyframe.get("starts") or [keyframe["begin"]]
            ends = zip(
                keyframe.get("members") or [keyframe["dst"]],
                keyframe.get("ends") or [keyframe["end"]],
                strict=True,
            )
            self.known.update({end: keyframe["round"] + 1.0 for end in ends})
            step = keyframe["round"] + 1 - FLIGHT if keyframe["round"] else 0.0
            for rank, begin in zip(ranks, begins, strict=True):
                self.known.setdefault((rank, begin), step)
                self.begins[rank].append((begin, step))
        for all_ in self.begins.values():
            all_.sort()

    def at(self, rank: int, time: float) -> float:
        """The step of a change: a keyframe's begin or end, or the rank's next begin."""
        if (step := self.known.get((rank, time))) is not None:
            return step
        mine = self.begins[rank]
        i = bisect_left(mine, (time, -1))
        return mine[i][1] if i < len(mine) else mine[-1][1] + 1.0 if mine else 0.0


@lru_cache(1 << 13)
def _piece(piece: Piece) -> Json:
    """A piece as plain data, shared by equal pieces."""
    values = [number(v, 3) for v in _some(piece.values)]
    return {
        "sure": sorted(piece.sure),
        **({"maybe": sorted(piece.maybe)} if piece.maybe else {}),
        **({"values": values} if values else {}),
    }


def _some(values: Sequence[float]) -> list[float]:
    """Some of the values, at equal distances."""
    n = len(values)
    return (
        list(values)
        if n <= MAX_VALUES
        else [values[i * n // MAX_VALUES] for i in range(MAX_VALUES)]
    )


# -- words -----------------------------------------------------------------------------


def _said(trace: EventLog, found: Contributions) -> str:
    """A sentence about the certainty of contributions."""
    if len(trace.ranks) > MAX_RANKS:
        return f"Contributions are traced for at most {MAX_RANKS} ranks."
    if found.rings:
        told = (
            "These are the messages of a ring all-reduce, so distkit knows which chunk each one "
            "carries, and whether it is added."
        )
    elif found.known:
        told = "The contributions follow from the meaning of the collectives and from equal values."
    elif any(s.op in REQUESTS for s in trace.spans):
        return "The trace does not record what a server computes: only values are shown."
    elif found.changes:
        return "The trace does not show which ranks contributed: only values are shown."
    else:
        return ""
    told = (
        "Each strip is a rank's tensor; a chunk has a layer in the colour of each rank whose "
        "contribution it contains, or shows its first values. "
    ) + told
    doubt = (
        " Pale: at most these ranks, whose values may have reached it; the trace does not record "
        "what was computed."
    )
    return told + (doubt if found.doubtful else "")


def _notices(trace: EventLog, keyframes: list[Json], more: int) -> dict[str, list[str]]:
    """Notices for the reader, and those that report no problem."""
    lost = [b for b in keyframes if b["end"] is None and "src" in b]
    stuck = [b for b in keyframes if b["end"] is None and "members" in b]
    never = sum(not b["sent"] for b in lost)
    dropped = trace.dropped
    found = [
        (f"{count(len(lost) - never, 'message')} not received", len(lost) > never),
        (f"{count(never, 'receive')} without a message", never),
        (f"{count(len(stuck), 'collective')} not finished", stuck),
        (f"{count(dropped, 'event')} dropped: the recorder's buffer was full", dropped),
    ]
    left_out = [
        (
            f"the first {len(keyframes):,} of {len(keyframes) + more:,} messages "
            "and collectives are drawn",
            more,
        ),
        (
            f"the first {MAX_PLACES:,} of {len(trace.ranks):,} ranks are drawn",
            len(trace.ranks) > MAX_PLACES,
        ),
    ]
    notes = [words for words, shown in left_out if shown]
    return {"notices": [words for words, shown in found if shown] + notes, "notes": notes}


def sentence(keyframe: Json, names: dict[int, str]) -> str:
    """A keyframe as text."""
    return ", ".join([who(keyframe, names), *what(keyframe)])


def who(keyframe: Json, names: dict[int, str]) -> str:
    """The participants of a keyframe."""

    def name(rank: int) -> str:
        return names.get(rank, f"rank {rank}")

    if "members" in keyframe:
        told = [name(rank) for rank in keyframe["members"]]
        if len(told) == len(names):
            return str(keyframe["op"])
        some = ", ".join(told) if len(told) < 5 else f"{told[0]} … {told[-1]} ({len(told)})"
        return f"{keyframe['op']} of {some}"
    op = "" if keyframe["op"] == "send" else f"{keyframe['op']} "
    return f"{op}{name(keyframe['src'])} → {name(keyframe['dst'])}"


def what(keyframe: Json) -> list[str]:
    """The payload of a keyframe, its effect, and whether it is missing."""
    missing = (
        "not finished"
        if "members" in keyframe
        else "not received"
        if keyframe["sent"]
        else "not sent"
    )
    return [
        *([f"chunk {keyframe['at']}"] if "at" in keyframe else []),
        *(["added" if keyframe["reduce"] else "replaces"] if "reduce" in keyframe else []),
        *([f"root {keyframe['root']}"] if keyframe.get("root") is not None else []),
        *([human_bytes(keyframe["nbytes"])] if keyframe["nbytes"] else []),
        *([missing] if keyframe["end"] is None else []),
    ]


def home_of(stage: Json) -> float:
    """The moment before the first end, which shows the initial tensors."""
    first = min((b["end"] for b in stage["keyframes"] if b["end"] is not None), default=math.inf)
    times = (c["time"] for c in stage["changes"] if c["time"] < first)
    return float(max(times, default=stage["start"]))


#: The number of panels; a run of more rounds also gets a list of keyframes.
PANELS = 6


@dataclass
class Clock:
    """A run on one clock.

    ``keyframes`` have captions; ``flights`` are drawn, each with the number of its keyframe;
    ``changes`` have their times; ``home`` is the moment before the first arrival.
    """

    unit: str
    start: float
    end: float
    home: float
    keyframes: list[Json] = field(default_factory=list)
    flights: list[tuple[int, Json]] = field(default_factory=list)
    changes: list[tuple[float, Json]] = field(default_factory=list)
    rows: list[list[object]] = field(default_factory=list)


def by_rounds(stage: Json) -> Clock:
    """A clock of rounds: a round takes 1, with all its messages at once, and is a keyframe."""
    rounds = _rounds(stage)
    clock = Clock("round", 0.0, 1.0 + max((n for n, _ in rounds), default=-1), 0.0)
    names, short = _names(stage)
    for i, (nth, members) in enumerate(rounds):
        begin, end = nth + 1 - FLIGHT, nth + 1.0
        keyframes = [stage["keyframes"][k] for k in members]
        for keyframe in keyframes:
            moved: Json = {"begin": begin, "end": None if keyframe["end"] is None else end}
            if "members" in keyframe:
                moved["starts"] = [begin for _ in keyframe["members"]]
                moved["ends"] = [None if e is None else end for e in keyframe["ends"]]
                moved["meet"] = (begin + end) / 2
            clock.flights.append((i, {**keyframe, **moved}))
        arrived = [k for k in members if stage["keyframes"][k]["end"] is not None]
        clock.keyframes.append(
            {
                "begin": begin,
                "end": end if arrived else None,
                "also": max(arrived or members),
                **_caption(keyframes, names),
            }
        )
        clock.rows.append([i, "", f"round {nth + 1}", "", _summary(keyframes, short), [], 0])
    clock.changes = sorted(((c["step"], c) for c in stage["changes"]), key=lambda c: c[0])
    return clock


def by_time(stage: Json) -> Clock:
    """A clock of measured time: a keyframe is a message or a collective."""
    clock = Clock("", stage["start"], stage["end"], home_of(stage))
    names, short = _names(stage)
    also = {k: i for i, (_, members) in enumerate(_rounds(stage)) for k in members}
    for i, keyframe in enumerate(stage["keyframes"]):
        caption = _caption([keyframe], names)
        clock.keyframes.append(
            {"begin": keyframe["begin"], "end": keyframe["end"], "also": also[i], **caption}
        )
        clock.flights.append((i, keyframe))
        group = names.get(keyframe.get("src"), keyframe["op"])
        clock.rows.append([i, group, *_row(keyframe, short), [], 0])
    clock.changes = sorted(((c["time"], c) for c in stage["changes"]), key=lambda c: c[0])
    return clock


def panels(stage: Json) -> list[list[object]]:
    """Rounds to show as panels: the keyframe, -1 for the start; a title; the time of its end.

    These are the start and all rounds, or some of many rounds at equal distances.
    """
    rounds, (_, short) = _rounds(stage), _names(stage)
    found: list[list[object]] = []
    latest = home_of(stage)
    for i, (nth, members) in enumerate(rounds):
        keyframes = [stage["keyframes"][k] for k in members]
        latest = max(latest, *(b["end"] or b["begin"] for b in keyframes))
        title = (
            who(keyframes[0], short) if len(keyframes) == 1 else f"round {nth + 1} of {len(rounds)}"
        )
        found.append([i, title, human_seconds(latest - stage["start"])])
    if len(found) < PANELS:
        return [[-1, "before", human_seconds(home_of(stage) - stage["start"])], *found]
    return thinned(found, PANELS)


def _names(stage: Json) -> tuple[dict[int, str], dict[int, str]]:
    """The names of the ranks, and short forms."""
    names = {node["rank"]: node["name"] for node in stage["nodes"]}
    return names, {rank: name.removeprefix("rank ") for rank, name in names.items()}


def _rounds(stage: Json) -> list[tuple[int, list[int]]]:
    """The rounds in the order of their ends: number and keyframes."""
    found: dict[int, list[int]] = defaultdict(list)
    for k, keyframe in enumerate(stage["keyframes"]):
        found[keyframe["round"]].append(k)
    lost = {
        n: all(stage["keyframes"][k]["end"] is None for k in members)
        for n, members in found.items()
    }
    return sorted(found.items(), key=lambda item: (lost[item[0]], item[0]))


def _caption(keyframes: list[Json], names: dict[int, str]) -> Json:
    """The caption of one or several keyframes: who, more, where."""
    where = {keyframe["where"] for keyframe in keyframes}
    caption = {"where": where.pop()} if len(where) == 1 else {}
    if len(keyframes) > 1:
        first, *more = _together(keyframes)
        return {"who": first, "more": " · ".join(more), **caption}
    (keyframe,) = keyframes
    took = "" if keyframe["end"] is None else human_seconds(keyframe["end"] - keyframe["begin"])
    more = [*what(keyframe), "" if keyframe["op"] == "send" else keyframe["label"], took]
    return {"who": who(keyframe, names), "more": " · ".join(filter(None, more)), **caption}


def _together(keyframes: list[Json]) -> Iterator[str]:
    """The common properties of several keyframes."""
    messages = sum("src" in keyframe for keyframe in keyframes)
    if messages:
        yield count(messages, "message")
    if messages < len(keyframes):
        yield count(len(keyframes) - messages, "collective")
    sizes = {keyframe["nbytes"] for keyframe in keyframes}
    if len(sizes) == 1 and (size := sizes.pop()):
        yield f"{human_bytes(size)} each"
    does = {keyframe.get("reduce") for keyframe in keyframes}
    if does in ({True}, {False}):
        yield "the chunks are added" if True in does else "the chunks overwrite what is there"


def _summary(keyframes: list[Json], short: dict[int, str]) -> str:
    if len(keyframes) == 1:
        return " ".join(_row(keyframes[0], short)).replace("  ", " ")
    return next(_together(keyframes))


def _row(keyframe: Json, short: dict[int, str]) -> list[str]:
    """The cells of a keyframe in the list."""
    parts = what(keyframe)
    return [who(keyframe, short), "", " · ".join(parts)]
