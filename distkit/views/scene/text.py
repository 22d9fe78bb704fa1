"""Formats a picture as a table with one row per message and collective, ordered by start."""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter

from distkit._format import aligned, count, human_bytes, human_seconds
from distkit.trace.log import grouped
from distkit.views.scene.frame import Json

COLUMNS = ("time", "what", "who", "tensor", "size", "took", "line")

#: Returns the name of a rank.
Name = Callable[[int], str]
#: A message or collective: start [s], call, ranks, and its duration: from the send to the end of
#: the receive, or from the first rank's start to the last rank's end; and one of its bars.
Entry = tuple[float, str, str, str, Json]


def rows(picture: Json) -> list[tuple[str, ...]]:
    """Return one row per message and collective, by column."""
    names = {lane["rank"]: lane["name"] for lane in picture["lanes"]}
    bars = {bar["id"]: bar for bar in picture["bars"]}

    def name(rank: int) -> str:
        return str(names.get(rank, f"rank {rank}"))

    entries = [_message(arrow, bars, name) for arrow in picture["arrows"]]
    ties = grouped([bar for bar in bars.values() if "tie" in bar], itemgetter("tie"))
    entries += [_collective(members, name) for members in ties.values()]
    return [
        (
            human_seconds(begin - (picture["start"] or 0.0)),
            call,
            ranks,
            f"{bar['dtype']}{bar.get('shape', [])}" if "dtype" in bar else "",
            human_bytes(bar["nbytes"]) if bar["nbytes"] else "",
            took,
            bar.get("where", ""),
        )
        for begin, call, ranks, took, bar in sorted(entries, key=itemgetter(0))
    ]


def headline(picture: Json) -> str:
    """Return a one-line description of the run."""
    facts = list(picture["facts"])
    if picture.get("bare"):
        return f"{picture['title']}: {', '.join(facts)}"
    if picture["messages"]:
        size = human_bytes(picture["message_bytes"])
        facts.append(f"{count(picture['messages'], 'message')} ({size})")
    if picture["collectives"]:
        facts.append(count(picture["collectives"], "collective"))
    if picture["start"] is not None:
        facts.append(human_seconds(picture["end"] - picture["start"]))
    return f"{picture['title'] or 'Timeline'}: {', '.join(facts) or 'nothing was recorded'}"


def table(picture: Json, limit: int = 20) -> str:
    """Return a table for terminals, with headline, first rows and notices."""
    all_rows = rows(picture)
    lines = aligned([COLUMNS, *all_rows[:limit]]) if all_rows else []
    output = [headline(picture), *(f"  {line}" for line in lines)]
    hidden = picture.get("entries", len(all_rows)) - limit
    if hidden > 0:
        output.append(f"  … and {hidden:,} more")
    if not picture.get("bare"):
        output += [f"  {value} {label}" for value, label, _ in picture["compared"]]
    return "\n".join(output + [f"  ! {notice}" for notice in picture["notices"]])


def _message(arrow: Json, bars: dict[str, Json], name: Name) -> Entry:
    bar = bars.get(arrow.get("send", "")) or bars[arrow["recv"]]
    sent, received = arrow["sent"], arrow["received"]
    took = "not received" if sent is not None else "never sent"
    if sent is not None and received is not None:
        took = human_seconds(received - sent)
    begin = bar["start"] if sent is None else sent
    call = f"{arrow['op']} {arrow.get('label', '')}".rstrip()
    return begin, call, f"{name(arrow['src'])} → {name(arrow['dst'])}", took, bar


def _collective(members: list[Json], name: Name) -> Entry:
    begin, ends = min(bar["start"] for bar in members), [bar["end"] for bar in members]
    took = "not finished" if None in ends else human_seconds(max(ends) - begin)
    if any(bar["state"] == "failed" for bar in members):
        took = "failed"
    ranks = [name(rank) for rank in sorted(bar["rank"] for bar in members)]
    names = ", ".join(ranks) if len(ranks) < 4 else f"{ranks[0]} … {ranks[-1]} ({len(ranks)})"
    call = " / ".join(sorted({bar["op"] for bar in members}))
    return begin, call, names, took, members[0]
