"""Describes a timeline in text, for front ends without pictures."""

from __future__ import annotations

from distkit._format import count, human_bytes, human_seconds
from distkit.views.scene.frame import Json, flagged


def described(picture: Json) -> str:
    """Return the numbers, totals and notices of a timeline."""
    facts, totals = list(picture["facts"]), picture["compared"]
    if picture.get("bare"):
        return f"{picture['title']}: {', '.join(facts)}"
    if picture["messages"]:
        size = human_bytes(picture["message_bytes"])
        facts.append(f"{count(picture['messages'], 'message')} ({size})")
    if picture["collectives"]:
        facts.append(count(picture["collectives"], "collective"))
    if picture["start"] is not None:
        facts.append(human_seconds(picture["end"] - picture["start"]))
    return "\n  ".join(
        [
            f"{picture['title'] or 'Timeline'}: {', '.join(facts) or 'nothing was recorded'}",
            *(f"{value} {label}" for value, label, _ in totals),
            *flagged(picture),
        ]
    )
