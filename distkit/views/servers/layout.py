"""Places of servers, keys, workers and the scheduler, in pixels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import count

from distkit.views.scene.frame import Json
from distkit.views.servers.story import Story

WIDTH, FIELD = 720, 580  # with a scheduler, all others are in the field to its left
#: At most so many are drawn; the others share a place beside them.
MAX_SERVERS, MAX_WORKERS, MAX_KEYS = 4, 10, 6
LEAST = 9  # width of a slot, and what follows it
HEAD, ROW, GAP, MARGIN, AISLE = 36, 50, 20, 8, 136  # heights, and the way to the workers


@dataclass(frozen=True)
class Places:
    """Where everything is: cards, people, keys on their servers, and who shares a place."""

    cards: list[Json]
    workers: list[Json]
    scheduler: list[Json]
    stubs: list[Json]
    rows: dict[tuple[int, str], Json]


def places(story: Story, rows: Collection[tuple[int, str]], quorum: int) -> Places:
    """The layout of a run.

    Args:
        story: of the run.
        rows: the keys on servers, in their order.
        quorum: how many gradients make an update, at most.
    """
    servers, workers, others = (story.of(role) for role in ("server", "worker", "scheduler"))
    width = FIELD if others or len(servers) > MAX_SERVERS else WIDTH
    keys = Counter(server for server, _ in rows)
    found = cards(servers, keys, width)
    at = {card["rank"]: card for card in found}
    nth = {server: count() for server in keys}
    top = found[0]["y"] + found[0]["h"] + AISLE if found else 80
    scheduler = {"rank": others[0], "x": WIDTH - 66, "y": top - AISLE / 2 - 14} if others else {}
    return Places(
        found,
        people(workers, top, width),
        [scheduler] if others else [],
        stubs(servers, workers, top, width),
        {
            (server, key): row(at[server], next(nth[server]), quorum)
            if server in at
            else {"shown": False}
            for server, key in rows
        },
    )


def cards(servers: Sequence[int], keys: dict[int, int], width: float) -> list[Json]:
    """A card for each server that is drawn, all of one height.

    Args:
        servers: their ranks.
        keys: how many keys each one has.
        width: of the field, in pixels.
    """
    drawn = servers[:MAX_SERVERS]
    n = max(1, len(drawn))
    wide = min(340.0, (width - 2 * MARGIN - GAP * (n - 1)) / n)
    left = (width - n * wide - GAP * (n - 1)) / 2
    most = max((keys.get(s, 0) for s in drawn), default=0)
    rows = max(1, min(most, MAX_KEYS))
    high = HEAD + ROW * rows + (22 if most > MAX_KEYS else 6)
    return [
        {
            "rank": s,
            "x": round(left + i * (wide + GAP), 1),
            "y": MARGIN,
            "w": round(wide, 1),
            "h": high,
            "more": max(0, keys.get(s, 0) - MAX_KEYS),
        }
        for i, s in enumerate(drawn)
    ]


def row(card: Json, nth: int, quorum: int) -> Json:
    """A key on a card: its box, the inbox's slots, where pulls wait, and where the version is."""
    x, y, w = card["x"] + 12, card["y"] + HEAD + ROW * min(nth, MAX_KEYS), card["w"] - 24
    if nth >= MAX_KEYS:  # not drawn: what flies there ends below the last row
        return {
            "shown": False,
            "slots": [[x, y, 30, 14]],
            "wait": [x + 50, y + 8],
            "pill": [x + w - 24, y + 8],
        }
    n = max(1, quorum)
    each = min(38.0, (w - 114) / n)
    if each >= LEAST:
        slots = [[round(x + i * each, 1), y + 26, round(each - 4, 1), 17] for i in range(n)]
        after = x + n * each
    else:  # a bar, and how many of how many
        slots, after = [[x, y + 26, max(20.0, min(70.0, w - 150)), 17]], x + w / 2 + 6
    return {
        "shown": True,
        "x": x,
        "y": y,
        "w": w,
        "h": ROW,
        "slots": slots,
        "wait": [round(after + 11, 1), y + 34.5],
        "pill": [x + w - 19, y + 13],
    }


def people(workers: Sequence[int], top: float, width: float) -> list[Json]:
    """The workers that are drawn, in a row."""
    drawn = workers[:MAX_WORKERS]
    spots = len(drawn) + (len(workers) > len(drawn))
    each = min(width / max(1, spots), 240.0)
    left = (width - each * spots) / 2 + each / 2
    return [
        {
            "rank": rank,
            "x": round(left + i * each, 1),
            "y": top,
            "room": round(each, 1),
            "r": 22 if spots <= 6 else 17,
        }
        for i, rank in enumerate(drawn)
    ]


def stubs(servers: Sequence[int], workers: Sequence[int], top: float, width: float) -> list[Json]:
    """One place for all nodes of a role that are not drawn."""
    found = []
    if (more := len(servers) - MAX_SERVERS) > 0:
        found.append({"role": "server", "x": WIDTH - 64, "y": 40, "text": f"+ {more:,} servers"})
    if (more := len(workers) - MAX_WORKERS) > 0:
        spots = MAX_WORKERS + 1
        x = width - width / spots / 2
        found.append({"role": "worker", "x": round(x, 1), "y": top, "text": f"+ {more:,}"})
    return found
