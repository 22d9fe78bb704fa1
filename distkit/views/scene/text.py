"""Formats a picture as a table with one row per message and collective, ordered by start."""

from __future__ import annotations

from collections import defaultdict

from distkit._format import aligned, count, human_bytes, human_seconds
from distkit.views.scene.frame import Json

COLUMNS = ("time", "what", "who", "tensor", "size", "took", "line")


#: A message or collective as text, by column. "took" is the time from the send to the end of the
#: receive, or from the first rank's start to the last rank's end; a bar covers one rank.
Row = tuple[str, str, str, str, str, str, str]


def rows(picture: Json) -> list[Row]:
    """Return one row per message and collective."""
    bars = {bar["id"]: bar for bar in picture["bars"]}
    names = {lane["rank"]: lane["name"] for lane in picture["lanes"]}
    ties = defaultdict(list)
    for bar in bars.values():
        if "tie" in bar:
            ties[bar["tie"]].append(bar)
    zero = picture["start"] or 0.0
    entries = [_message(a, bars, names, zero) for a in picture["arrows"]]
    entries += [_collective(members, names, zero) for members in ties.values()]
    return [row for _, row in sorted(entries, key=lambda pair: pair[0])]


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


def _message(
    arrow: Json, bars: dict[str, Json], names: dict[int, str], zero: float
) -> tuple[float, Row]:
    bar = bars.get(arrow.get("send", "")) or bars[arrow["recv"]]
    sent, received = arrow["sent"], arrow["received"]
    took = "not received" if sent is not None else "never sent"
    if sent is not None and received is not None:
        took = human_seconds(received - sent)
    begin = bar["start"] if sent is None else sent
    ranks = f"{_name(names, arrow['src'])} → {_name(names, arrow['dst'])}"
    call = f"{arrow['op']} {arrow.get('label', '')}".rstrip()
    return begin, (
        human_seconds(begin - zero),
        call,
        ranks,
        _tensor(bar),
        _size(arrow),
        took,
        bar.get("where", ""),
    )


def _collective(members: list[Json], names: dict[int, str], zero: float) -> tuple[float, Row]:
    begin = min(bar["start"] for bar in members)
    ends = [bar["end"] for bar in members]
    took = "not finished"
    if all(end is not None for end in ends):
        failed = any(bar["state"] == "failed" for bar in members)
        took = "failed" if failed else human_seconds(max(ends) - begin)
    first = members[0]
    ranks = sorted(bar["rank"] for bar in members)
    names_text = (
        ", ".join(_name(names, r) for r in ranks)
        if len(ranks) < 4
        else (f"{_name(names, ranks[0])} … {_name(names, ranks[-1])} ({len(ranks)})")
    )
    call = " / ".join(sorted({bar["op"] for bar in members}))
    return begin, (
        human_seconds(begin - zero),
        call,
        names_text,
        _tensor(first),
        _size(first),
        took,
        first.get("where", ""),
    )


def _name(names: dict[int, str], rank: int) -> str:
    return names.get(rank, f"rank {rank}")


def _tensor(bar: Json) -> str:
    return f"{bar['dtype']}{bar.get('shape', [])}" if "dtype" in bar else ""


def _size(item: Json) -> str:
    return human_bytes(item["nbytes"]) if item["nbytes"] else ""
