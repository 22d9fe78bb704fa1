"""Text formatting of bytes, seconds, counts, ranks, calls, tables and axis ticks."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar

#: Maximum number of intervals between the labels of an axis.
MAX_TICKS = 8

#: The noun for a rank in messages about a run: "worker" if the run has servers.
RANK_NOUN: ContextVar[str] = ContextVar("RANK_NOUN", default="rank")


def count(n: int, noun: str) -> str:
    """Format a number with a noun.

    >>> count(1, "message"), count(1203, "event")
    ('1 message', '1,203 events')
    """
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"


def ordinal(n: int) -> str:
    """Format an ordinal number.

    >>> [ordinal(n) for n in (1, 2, 3, 4, 11, 22)]
    ['1st', '2nd', '3rd', '4th', '11th', '22nd']
    """
    ending = {1: "st", 2: "nd", 3: "rd"}.get(n % 10, "th") if n // 10 % 10 != 1 else "th"
    return f"{n}{ending}"


def times(n: int) -> str:
    """Format a number of times, such as "once" or "3 times"."""
    return "once" if n == 1 else f"{n} times"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table with aligned columns.

    >>> aligned([("rank", "state"), ("10", "idle")])
    ['rank  state', '10    idle']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def human_bytes(n: float) -> str:
    """Format bytes with a binary unit.

    >>> human_bytes(64), human_bytes(4096), human_bytes(1.5 * 2**20)
    ('64 B', '4 KiB', '1.5 MiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(n) < 1024:
            return f"{_short(n)} {unit}"
        n /= 1024
    return f"{_short(n)} TiB"


def human_seconds(s: float) -> str:
    """Format seconds with a unit that keeps the number short.

    >>> human_seconds(0.0000123), human_seconds(0.25), human_seconds(2)
    ('12.3 µs', '250 ms', '2 s')
    """
    scale, unit = time_unit(s)
    return f"{_short(s * scale)} {unit}"


def joined(words: Sequence[str]) -> str:
    """Join words with commas and "and".

    >>> joined(["a", "b", "c"]), joined(["a"])
    ('a, b and c', 'a')
    """
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def named(ranks: Iterable[int], noun: str = "") -> str:
    """Format ranks in ascending order, and abbreviate long lists.

    ``noun`` is the noun for a rank, by default :data:`RANK_NOUN`.

    >>> named([3]), named([2, 0, 3]), named(range(100))
    ('rank 3', 'ranks 0, 2 and 3', 'ranks 0, 1, 2 … 99 (100 in all)')
    """
    *first, last = sorted(ranks)
    noun = noun or RANK_NOUN.get()
    if not first:
        return f"{noun} {last}"
    if len(first) > 7:
        return f"{noun}s {', '.join(map(str, first[:3]))} … {last} ({len(first) + 1} in all)"
    return f"{noun}s {', '.join(map(str, first))} and {last}"


def time_unit(s: float) -> tuple[float, str]:
    """Return the factor and the unit that display a duration [s] as a short number."""
    if abs(s) >= 0.9995:
        return 1, "s"
    return (1e3, "ms") if abs(s) >= 0.9995e-3 else (1e6, "µs")


def round_step(span: float, steps: int) -> float:
    """Return the smallest step of 1, 2 or 5 · 10^k that fits at most ``steps`` times into ``span``.

    >>> round_step(10, 6), round_step(0.9, 10)
    (2.0, 0.1)
    """
    raw = span / max(1, steps)
    power = 10.0 ** math.floor(math.log10(raw))
    return next(k * power for k in (1.0, 2.0, 5.0, 10.0) if k * power >= raw * 0.999)


def ticks(first: float, last: float) -> Iterator[tuple[float, str]]:
    """Yield the time [s] and the label of each tick of a time axis.

    >>> list(ticks(0, 0.0021))
    [(0.0, '0'), (0.0005, '0.5 ms'), (0.001, '1.0 ms'), (0.0015, '1.5 ms'), (0.002, '2.0 ms')]
    """
    step = round_step(last - first, MAX_TICKS)
    scale, unit = time_unit(last * 0.999)
    digits = max(0, -math.floor(math.log10(step * scale) + 1e-9))
    for n in range(math.ceil(first / step - 1e-9), math.floor(last / step + 1e-9) + 1):
        yield n * step, "0" if n == 0 else f"{n * step * scale:.{digits}f} {unit}"


def _short(x: float) -> str:
    """Format a number as an integer if its magnitude is at least 100, else to three digits."""
    if abs(x) >= 100:
        return f"{x:.0f}"
    return f"{x:.3g}"


def short_call(name: str, args: Sequence[object], kwargs: Mapping[str, object]) -> str:
    """Format a call with shortened arguments, or only its name if it has none.

    >>> short_call("train", ("ring", [1, 2], len), {"epochs": 3}), short_call("train", (), {})
    ("train('ring', list, len, epochs=3)", 'train')
    """
    values = [
        *map(_argument, args),
        *(f"{key}={_argument(value)}" for key, value in kwargs.items()),
    ]
    return f"{name}({', '.join(values)})" if values else name


def _argument(value: object) -> str:
    is_plain = isinstance(value, str | bool | int | float | None)
    return reprlib.repr(value) if is_plain else getattr(value, "__name__", type(value).__name__)
