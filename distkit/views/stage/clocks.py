"""The two clocks of a stage: rounds, with all their messages at once, and measured time. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from distkit._format import count, human_bytes, human_seconds
from distkit.views.scene.frame import Json
from distkit.views.scene.painter import thinned
from distkit.views.stage.projection import FLIGHT, home_of, what, who

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
    for i, (number, members) in enumerate(rounds):
        begin, end = number + 1 - FLIGHT, number + 1.0
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
        clock.rows.append([i, "", f"round {number + 1}", "", _summary(keyframes, short), [], 0])
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
    for i, (number, members) in enumerate(rounds):
        keyframes = [stage["keyframes"][k] for k in members]
        latest = max(latest, *(b["end"] or b["begin"] for b in keyframes))
        title = (
            who(keyframes[0], short)
            if len(keyframes) == 1
            else f"round {number + 1} of {len(rounds)}"
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
