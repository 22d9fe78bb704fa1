"""Describes a timeline in text, for front ends without pictures."""

from __future__ import annotations

from distkit._format import count, human_bytes, human_seconds
from distkit.views.scene.frame import Json


def described(picture: Json) -> str:
    """Return the headline, totals and notices of a timeline."""
    totals = [] if picture.get("bare") else picture["compared"]
    lines = [headline(picture), *(f"  {value} {label}" for value, label, _ in totals)]
    return "\n".join(lines + [f"  ! {notice}" for notice in picture["notices"]])


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
