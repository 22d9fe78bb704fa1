"""Positions of servers, keys, workers, the scheduler and a histogram's bars, in pixels.

The histogram shows staleness: the number of updates between a worker's pull and the update that
uses its gradient.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count

from distkit.views.scene.frame import Json
from distkit.views.scene.svg import text_width
from distkit.views.servers.history import ServerHistory

WIDTH, FIELD = 720, 580  # with a scheduler, all others are in the field to its left
#: The largest numbers that are drawn; the others share a place beside them.
MAX_SERVERS, MAX_WORKERS, MAX_KEYS = 4, 10, 6
LEAST = 9  # least width of a slot with the gap after it
HEAD, ROW, GAP, MARGIN, AISLE = 36, 50, 20, 8, 136  # heights, and the distance to the workers


@dataclass(frozen=True)
class Places:
    """The positions of server cards, workers, the scheduler, shared places, and keys on servers."""

    cards: list[Json]
    workers: list[Json]
    scheduler: list[Json]
    stubs: list[Json]
    rows: dict[tuple[int, str], Json]


def places(history: ServerHistory, rows: Collection[tuple[int, str]], quorum: int) -> Places:
    """The layout of a run.

    Args:
        history: the history of the run.
        rows: the keys on servers, in order.
        quorum: the largest number of gradients in an update.
    """
    servers, workers, others = (history.of(role) for role in ("server", "worker", "scheduler"))
    width = FIELD if others or len(servers) > MAX_SERVERS else WIDTH
    keys = Counter(server for server, _ in rows)
    found = cards(servers, keys, width)
    at = {card["rank"]: card for card in found}
    nth = {server: count() for server in keys}
    top = found[0]["y"] + found[0]["h"] + AISLE if found else 80
    scheduler = {"rank": others[0], "x": WIDTH - 66, "y": top - AISLE / 2 - 14} if others else {}
    return Places(
        found,
        worker_row(workers, top, width),
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
    """A card for each drawn server, all of the same height.

    Args:
        servers: the ranks of the servers.
        keys: the number of keys of each server.
        width: the width of the field [px].
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
    """A key on a card: its box, the inbox's slots, the places of waiting pulls and the version."""
    x, y, w = card["x"] + 12, card["y"] + HEAD + ROW * min(nth, MAX_KEYS), card["w"] - 24
    if nth >= MAX_KEYS:  # not drawn: arrows to it end below the last row
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
    else:  # a bar and a count
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


def worker_row(workers: Sequence[int], top: float, width: float) -> list[Json]:
    """The drawn workers, in a row."""
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
    """A shared place for the nodes of each role that are not drawn."""
    found = []
    if (more := len(servers) - MAX_SERVERS) > 0:
        found.append({"role": "server", "x": WIDTH - 64, "y": 40, "text": f"+ {more:,} servers"})
    if (more := len(workers) - MAX_WORKERS) > 0:
        spots = MAX_WORKERS + 1
        x = width - width / spots / 2
        found.append({"role": "worker", "x": round(x, 1), "y": top, "text": f"+ {more:,}"})
    return found


#: The largest number of bins; the widths of all and of one, and the highest bar [px].
MAX_BINS, ROOM, WIDEST, HIGH = 12, 200.0, 40.0, 36
AXIS = ["updates between a worker's pull", "and the use of its gradient"]
#: The size of the labels, the tolerance for wider fonts of a page, and the gap [px].
LETTERS, WIDER, FREE = 10.5, 1.14, 2.0


def histogram(late: Iterable[int]) -> Json:
    """Bins of equal width from 0, of one value each if there are few.

    ``width`` is in updates; ``labels`` has the first value of each bin, ``ranges`` its values and
    ``totals`` its gradients at the end of the run; ``pitch`` is the distance between bars and
    ``high`` the height of the highest [px]; ``axis`` is the title of the axis.

    Args:
        late: the staleness of each gradient.

    >>> histogram([0, 0, 1, 3])["ranges"], histogram([0, 25, 427])["ranges"][:2]
    (['0', '1', '2', '3'], ['0–49', '50–99'])
    >>> histogram([0, 25, 427])["totals"]
    [2, 0, 0, 0, 0, 0, 0, 0, 1]
    """
    found = Counter(late)
    most = max([2, *found])  # the axis has at least three values
    return next(d for width in _widths(most) if _fits(d := _binned(found, most, width)))


def bin_of(staleness: Json, late: int | None) -> int | None:
    """The bin of a gradient, or None if it has not been applied."""
    return None if late is None else late // int(staleness["width"])


def bin_counts(staleness: Json) -> str:
    """The bins that are not empty, as text.

    >>> bin_counts(histogram([0, 0, 1]))
    '0: 2, 1: 1'
    """
    pairs = zip(staleness["ranges"], staleness["totals"], strict=True)
    return ", ".join(f"{label}: {n:,}" for label, n in pairs if n)


def brief(n: int) -> str:
    """A short form of a count.

    >>> brief(9_999), brief(123_458)
    ('9,999', '123k')
    """
    return f"{n:,}" if n < 10_000 else f"{n // 1000:,}k"


def _widths(most: int) -> Iterator[int]:
    """The widths 1, 2, 5, 10, 20 … that need at most :data:`MAX_BINS` bins."""
    widths = (k * 10**power for power in count() for k in (1, 2, 5))
    return (width for width in widths if most // width < MAX_BINS)


def _binned(found: Counter[int], most: int, width: int) -> Json:
    firsts = range(0, most + 1, width)
    totals = [0] * len(firsts)
    for late, n in found.items():
        totals[late // width] += n
    ranges = [f"{a:,}" if width == 1 else f"{a:,}–{a + width - 1:,}" for a in firsts]
    pitch = round(min(WIDEST, ROOM / len(firsts)), 1)
    return {
        "width": width,
        "labels": [f"{a:,}" for a in firsts],
        "ranges": ranges,
        "totals": totals,
        "pitch": pitch,
        "high": HIGH,
        "axis": AXIS,
    }


def _fits(drawn: Json) -> bool:
    """True if no label or count overlaps the next bin."""
    labels = [*drawn["labels"], *map(brief, drawn["totals"])]
    widest = max(text_width(label, LETTERS) for label in labels)
    return WIDER * widest + FREE <= drawn["pitch"] or len(drawn["labels"]) == 1
