"""The two clocks of a stage: rounds, in which messages fly together, and measured time. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from distkit.views.scene.frame import Json
from distkit.views.scene.painter import thinned
from distkit.views.scene.units import count, human_bytes, human_seconds
from distkit.views.stage.projection import FLIGHT, home_of, what, who

#: A list of the beats stands beside a run of more rounds than there are panels.
PANELS = 6


@dataclass
class Clock:
    """A run as one clock has it.

    ``beats`` are told, ``flights`` drawn, each with the number of the beat that it is a part of;
    ``changes`` have their times; ``home`` is the moment before anything has arrived.
    """

    unit: str
    start: float
    end: float
    home: float
    beats: list[Json] = field(default_factory=list)
    flights: list[tuple[int, Json]] = field(default_factory=list)
    changes: list[tuple[float, Json]] = field(default_factory=list)
    rows: list[list[object]] = field(default_factory=list)


def by_rounds(stage: Json) -> Clock:
    """All messages of a round fly together, and a round takes 1: a beat is a whole round."""
    rounds = _rounds(stage)
    clock = Clock("round", 0.0, 1.0 + max((n for n, _ in rounds), default=-1), 0.0)
    names, short = _names(stage)
    for i, (number, members) in enumerate(rounds):
        begin, end = number + 1 - FLIGHT, number + 1.0
        beats = [stage["beats"][k] for k in members]
        for beat in beats:
            moved: Json = {"begin": begin, "end": None if beat["end"] is None else end}
            if "members" in beat:
                moved["starts"] = [begin for _ in beat["members"]]
                moved["ends"] = [None if e is None else end for e in beat["ends"]]
                moved["meet"] = (begin + end) / 2
            clock.flights.append((i, {**beat, **moved}))
        arrived = [k for k in members if stage["beats"][k]["end"] is not None]
        clock.beats.append(
            {
                "begin": begin,
                "end": end if arrived else None,
                "also": max(arrived or members),
                **_told(beats, names),
            }
        )
        clock.rows.append([i, "", f"round {number + 1}", "", _summary(beats, short), [], 0])
    clock.changes = sorted(((c["step"], c) for c in stage["changes"]), key=lambda c: c[0])
    return clock


def by_time(stage: Json) -> Clock:
    """As measured: a beat is a message or a collective."""
    clock = Clock("", stage["start"], stage["end"], home_of(stage))
    names, short = _names(stage)
    also = {k: i for i, (_, members) in enumerate(_rounds(stage)) for k in members}
    for i, beat in enumerate(stage["beats"]):
        told = _told([beat], names)
        clock.beats.append({"begin": beat["begin"], "end": beat["end"], "also": also[i], **told})
        clock.flights.append((i, beat))
        group = names.get(beat.get("src"), beat["op"])
        clock.rows.append([i, group, *_row(beat, short), [], 0])
    clock.changes = sorted(((c["time"], c) for c in stage["changes"]), key=lambda c: c[0])
    return clock


def panels(stage: Json) -> list[list[object]]:
    """Rounds that tell the story: the beat, -1 for the start; a title; when it had ended.

    The start and all rounds, or of many rounds some at equal distances.
    """
    rounds, (_, short) = _rounds(stage), _names(stage)
    found: list[list[object]] = []
    latest = home_of(stage)
    for i, (number, members) in enumerate(rounds):
        beats = [stage["beats"][k] for k in members]
        latest = max(latest, *(b["end"] or b["begin"] for b in beats))
        title = who(beats[0], short) if len(beats) == 1 else f"round {number + 1} of {len(rounds)}"
        found.append([i, title, human_seconds(latest - stage["start"])])
    if len(found) < PANELS:
        return [[-1, "before", human_seconds(home_of(stage) - stage["start"])], *found]
    return thinned(found, PANELS)


def _names(stage: Json) -> tuple[dict[int, str], dict[int, str]]:
    """The ranks' names, and in short."""
    names = {node["rank"]: node["name"] for node in stage["nodes"]}
    return names, {rank: name.removeprefix("rank ") for rank, name in names.items()}


def _rounds(stage: Json) -> list[tuple[int, list[int]]]:
    """The rounds in the order of their ends: number, and beats."""
    found: dict[int, list[int]] = defaultdict(list)
    for k, beat in enumerate(stage["beats"]):
        found[beat["round"]].append(k)
    lost = {
        n: all(stage["beats"][k]["end"] is None for k in members) for n, members in found.items()
    }
    return sorted(found.items(), key=lambda item: (lost[item[0]], item[0]))


def _told(beats: list[Json], names: dict[int, str]) -> Json:
    """One or several beats in words: who, more, where."""
    where = {beat["where"] for beat in beats}
    told = {"where": where.pop()} if len(where) == 1 else {}
    if len(beats) > 1:
        first, *more = _together(beats)
        return {"who": first, "more": " · ".join(more), **told}
    (beat,) = beats
    took = "" if beat["end"] is None else human_seconds(beat["end"] - beat["begin"])
    more = [*what(beat), "" if beat["op"] == "send" else beat["label"], took]
    return {"who": who(beat, names), "more": " · ".join(filter(None, more)), **told}


def _together(beats: list[Json]) -> Iterator[str]:
    """What several beats have in common."""
    messages = sum("src" in beat for beat in beats)
    if messages:
        yield count(messages, "message")
    if messages < len(beats):
        yield count(len(beats) - messages, "collective")
    sizes = {beat["nbytes"] for beat in beats}
    if len(sizes) == 1 and (size := sizes.pop()):
        yield f"{human_bytes(size)} each"
    does = {beat.get("reduce") for beat in beats}
    if does in ({True}, {False}):
        yield "the chunks are added" if True in does else "the chunks overwrite what is there"


def _summary(beats: list[Json], short: dict[int, str]) -> str:
    if len(beats) == 1:
        return " ".join(_row(beats[0], short)).replace("  ", " ")
    return next(_together(beats))


def _row(beat: Json, short: dict[int, str]) -> list[str]:
    """A beat in a list: who, and what."""
    parts = what(beat)
    return [who(beat, short), "", " · ".join(parts)]
