"""What stands around bars and arrows: lanes, sums and notices, the same for every projection."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from distkit.events import COMPUTATION, State
from distkit.trace.calls import op_name
from distkit.trace.columns import Look
from distkit.trace.hosts import Traffic, agreement, between, several
from distkit.views.scene.units import count, human_bytes, human_seconds, joined

#: At most so many lanes are drawn; a notice names the rest.
MAX_LANES = 256

#: A notice for each of at most so many kinds of what was not recorded.
MOST_UNSEEN = 3

_ODD = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")

#: A JSON object: numbers, strings, booleans, lists, objects and None, and finite numbers only.
Json = dict[str, Any]


def frame(
    meta: Mapping[str, Any],
    sums: Mapping[str, int],
    drawn: int,
    lane: Callable[[int], Json],
    seen: Iterable[int],
    named: Collection[int],
    opened: Iterable[tuple[int, Look]],
    live: bool,
    found: Traffic | None = None,
) -> Json:
    """All but bars and arrows: lanes, the sums under the picture, notices.

    Args:
        meta: the trace's ``meta``.
        sums: of the whole trace, drawn or not; sizes in bytes.
        drawn: so many of its operations.
        lane: what a rank's operations add up to.
        seen: ranks seen in events.
        named: those, and the peers of their operations.
        opened: the operations that have not ended: of each its rank, and what it is.
        live: whether the run goes on.
        found: what hosts have sent each other.
    """
    ranks = _ranks(meta, seen)
    unfinished = [] if live else _unfinished(opened, meta)
    idle = [] if live else [r for r in ranks if r not in named and _serves(meta, r)]
    note = [f"{joined([name(meta, r) for r in idle])} did nothing: not drawn"] if idle else []
    return {
        "title": clean(str(meta.get("name", ""))),
        "facts": facts(meta, len(ranks)),
        "lanes": [{**_lane(meta, r), **lane(r)} for r in ranks if r < MAX_LANES and r not in idle],
        "groups": {str(g): list(r) for g, r in meta.get("groups", {}).items()},
        "live": live,
        **sums,
        "compared": compared(meta, found or {}),
        "open": _open(meta),
        "notices": [*unfinished, *_left_out(meta, sums["operations"], drawn, ranks), *note],
        "notes": note,
    }


def flagged(picture: Json) -> list[str]:
    """The notices as lines of text, with an exclamation mark before all that are not mere notes.

    >>> flagged({"notices": ["2 lost", "9 are drawn"], "notes": ["9 are drawn"]})
    ['! 2 lost', '9 are drawn']
    """
    notes = picture.get("notes", ())
    return [words if words in notes else f"! {words}" for words in picture["notices"]]


def _ranks(meta: Mapping[str, Any], seen: Iterable[int]) -> list[int]:
    named = (int(r) for r in meta.get("ranks", {}))
    return sorted({*range(int(meta.get("world_size", 0))), *named, *seen})


def about(meta: Mapping[str, Any], rank: int) -> Mapping[str, Any]:
    """What is known of a rank."""
    ranks = meta.get("ranks", {})
    found: Mapping[str, Any] = ranks.get(str(rank), ranks.get(rank, {}))
    return found


def name(meta: Mapping[str, Any], rank: int) -> str:
    """The name of a rank."""
    return clean(str(about(meta, rank).get("name") or f"rank {rank}"))


def _serves(meta: Mapping[str, Any], rank: int) -> bool:
    """True for a server or the scheduler that has not died."""
    died = meta.get("ends", {}).get(str(rank), {}).get("how") == "died"
    return about(meta, rank).get("role") in ("server", "scheduler") and not died


def _lane(meta: Mapping[str, Any], rank: int) -> Json:
    known, called = about(meta, rank), name(meta, rank)
    host = several(meta).get(rank)
    detail = [f"rank {rank}"] if called != f"rank {rank}" else []
    detail += [str(known["device"])] if known.get("device") not in (None, "", "cpu") else []
    role = str(known.get("role") or "")
    lane = {"rank": rank, "name": called, "role": role, "detail": " · ".join(detail)}
    return lane if host is None else {**lane, "host": clean(host)}


def facts(meta: Mapping[str, Any], ranks: int) -> list[str]:
    """How many ranks on how many hosts, and the backend and device; the same word once.

    >>> facts({"ranks": {"0": {"role": "worker"}, "1": {"role": "server"}}, "backend": "gloo"}, 2)
    ['1 worker and 1 server', 'gloo']
    """
    roles = Counter(str(about.get("role") or "") for about in meta.get("ranks", {}).values())
    parts = [count(roles[role], role) for role in ("worker", "server") if roles["server"]]
    known = [joined(parts) or count(ranks, "rank")] if ranks else []
    if hosts := {*several(meta).values()}:
        known.append(count(len(hosts), "host"))
    return [*known, *dict.fromkeys(str(meta[k]) for k in ("backend", "device") if meta.get(k))]


def compared(meta: Mapping[str, Any], found: Traffic) -> list[tuple[str, str, str]]:
    """What a run on several hosts adds to the sums: a figure, what it is, and more in a hint.

    Args:
        meta: the trace's ``meta``.
        found: what its hosts have sent each other.
    """
    if not (hosts := several(meta)):
        return []
    messages, nbytes = between(found)
    ways = (f"{a} → {b}: {human_bytes(n)}" for (a, b), (_, n) in found.items())
    words = f"between hosts · {count(messages, 'message')}"
    told = [(human_bytes(nbytes), words, clean("\n".join(ways)))] if found else []
    if (error := agreement(meta)) is not None:
        clocks, names = meta["clocks"], [*dict.fromkeys(hosts.values())]
        each = (
            f"{name}: {c['ahead']:+.6f} s ± {human_seconds(c['error'])}"
            for name, c in clocks.items()
        )
        some = joined(names) if len(names) < 5 else count(len(names), "host")
        told.append(
            (
                f"±{human_seconds(error)}",
                f"between the clocks of {clean(some)}",
                clean("\n".join(each)),
            )
        )
    return told


def _left_out(meta: Mapping[str, Any], operations: int, drawn: int, ranks: list[int]) -> list[str]:
    """What the reader must know before trusting the picture."""
    dropped, found = int(sum(meta.get("dropped", {}).values())), list[str]()
    if dropped:
        found.append(
            f"{count(dropped, 'event')} dropped: the recorder's buffer was full, "
            "so operations may be missing here"
        )
    found += [limit["text"] for limit in meta.get("limits", {}).values()]
    unseen = sum(map(Counter, meta.get("unseen", {}).values()), Counter[str]())
    found += [f"{what} ({count(n, 'time')})" for what, n in unseen.most_common(MOST_UNSEEN)]
    if any(r >= MAX_LANES for r in ranks):
        found.append(
            f"the first {MAX_LANES} of {len(ranks):,} ranks are drawn; the totals include all"
        )
    elif drawn < operations:
        found.append(
            f"the first {drawn:,} of {operations:,} operations are drawn; the totals include all"
        )
    return found


def _unfinished(opened: Iterable[tuple[int, Look]], meta: Mapping[str, Any]) -> list[str]:
    """A flag for a stopped run, and a line for each name of operations that never ended."""
    stuck: dict[str, list[str]] = defaultdict(list)
    stopped = ["the run was stopped"] if meta.get("interrupted") else []
    for rank, it in sorted(opened, key=lambda one: one[0]):
        if it.op not in COMPUTATION:
            died = meta.get("ends", {}).get(str(rank), {}).get("how") == "died"
            open_ = "died in" if died else _open(meta)
            verb = "paused before" if it.state is State.SCHEDULED else open_
            stuck[f"{verb} {op_name(it)}"].append(name(meta, rank))
    found = [f"{where}: {_names([*dict.fromkeys(names)])}" for where, names in stuck.items()]
    return [*stopped, *found]


def _open(meta: Mapping[str, Any]) -> str:
    """What to say of operations that have not ended, when the run has."""
    return "stopped in" if meta.get("interrupted") else "still in"


def _names(names: list[str]) -> str:
    more = f" and {len(names) - 16:,} more" if len(names) > 16 else ""
    return ", ".join(names[:16]) + more


def clean(text: str) -> str:
    """A text without characters that neither XML nor UTF-8 can hold."""
    return _ODD.sub("\ufffd", text)
