"""Names, lanes, totals and notices around a picture, shared by all projections."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

from distkit._format import count, human_bytes, human_seconds, joined
from distkit.events import COMPUTATION, State
from distkit.trace.calls import op_name
from distkit.trace.columns import Category
from distkit.trace.hosts import Traffic, agreement, between, several
from distkit.trace.info import RunInfo

#: Maximum number of lanes drawn; a notice reports the others.
MAX_LANES = 256

#: Maximum number of notices about unrecorded calls.
MAX_UNRECORDED = 3

_INVALID = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")

#: A JSON object: numbers, strings, booleans, lists, objects and None, and finite numbers only.
Json = dict[str, Any]


def flagged(picture: Json) -> list[str]:
    """Return the notices as lines of text; those that are not mere notes start with "! ".

    >>> flagged({"notices": ["2 lost", "9 are drawn"], "notes": ["9 are drawn"]})
    ['! 2 lost', '9 are drawn']
    """
    notes = picture.get("notes", ())
    return [words if words in notes else f"! {words}" for words in picture["notices"]]


def name(info: RunInfo, rank: int) -> str:
    """Return the name of a rank."""
    return clean(info.rank(rank).name)


def lane(info: RunInfo, rank: int) -> Json:
    """Return the name, role, device and host of a rank."""
    known, display_name = info.rank(rank), name(info, rank)
    host = several(info).get(rank)
    detail = [f"rank {rank}"] if display_name != f"rank {rank}" else []
    detail += [known.device] if known.device not in ("", "cpu") else []
    found = {"rank": rank, "name": display_name, "role": known.role, "detail": " · ".join(detail)}
    return found if host is None else {**found, "host": clean(host)}


def facts(info: RunInfo, ranks: int) -> list[str]:
    """Return the numbers of ranks and hosts, the backend and the device, without duplicates.

    >>> from distkit.trace.info import RankInfo
    >>> ranks = {0: RankInfo(role="worker"), 1: RankInfo(role="server")}
    >>> facts(RunInfo(ranks=ranks, backend="gloo"), 2)
    ['1 worker and 1 server', 'gloo']
    """
    roles = Counter(known.role for known in info.ranks.values())
    parts = [count(roles[role], role) for role in ("worker", "server") if roles["server"]]
    known = [joined(parts) or count(ranks, "rank")] if ranks else []
    if hosts := {*several(info).values()}:
        known.append(count(len(hosts), "host"))
    return [*known, *dict.fromkeys(filter(None, (info.backend, info.device)))]


def compared(info: RunInfo, found: Traffic) -> list[tuple[str, str, str]]:
    """Return totals of a run on several hosts: value, label and tooltip of each.

    Args:
        info: metadata of the run.
        found: traffic between its hosts.
    """
    if not (hosts := several(info)):
        return []
    messages, nbytes = between(found)
    routes = (f"{a} → {b}: {human_bytes(n)}" for (a, b), (_, n) in found.items())
    words = f"between hosts · {count(messages, 'message')}"
    totals = [(human_bytes(nbytes), words, clean("\n".join(routes)))] if found else []
    if (error := agreement(info)) is not None:
        names = [*dict.fromkeys(hosts.values())]
        each = (
            f"{name}: {clock.ahead:+.6f} s ± {human_seconds(clock.error or 0.0)}"
            for name, clock in info.clocks.items()
        )
        names_or_count = joined(names) if len(names) < 5 else count(len(names), "host")
        totals.append(
            (
                f"±{human_seconds(error)}",
                f"between the clocks of {clean(names_or_count)}",
                clean("\n".join(each)),
            )
        )
    return totals


def left_out(info: RunInfo, operations: int, drawn: int, ranks: list[int]) -> list[str]:
    """Return notices about missing events, ranks and operations."""
    dropped, found = sum(info.dropped.values()), list[str]()
    if dropped:
        found.append(
            f"{count(dropped, 'event')} dropped: the recorder's buffer was full, "
            "so operations may be missing here"
        )
    found += [limit.text for limit in info.limitations.values()]
    unrecorded = sum(map(Counter, info.unrecorded.values()), Counter[str]())
    found += [f"{what} ({count(n, 'time')})" for what, n in unrecorded.most_common(MAX_UNRECORDED)]
    if any(r >= MAX_LANES for r in ranks):
        found.append(
            f"the first {MAX_LANES} of {len(ranks):,} ranks are drawn; the totals include all"
        )
    elif drawn < operations:
        found.append(
            f"the first {drawn:,} of {operations:,} operations are drawn; the totals include all"
        )
    return found


def unfinished(opened: Iterable[tuple[int, Category]], info: RunInfo) -> list[str]:
    """Return a notice for a stopped run, and one per name of operations that never ended."""
    stuck: dict[str, list[str]] = defaultdict(list)
    stopped = ["the run was stopped"] if info.interrupted else []
    for rank, category in sorted(opened, key=lambda item: item[0]):
        if category.op not in COMPUTATION:
            open_ = "died in" if info.died(rank) else verb_for_open(info)
            verb = "paused before" if category.state is State.SCHEDULED else open_
            stuck[f"{verb} {op_name(category)}"].append(name(info, rank))
    found = [f"{where}: {_names([*dict.fromkeys(names)])}" for where, names in stuck.items()]
    return [*stopped, *found]


def verb_for_open(info: RunInfo) -> str:
    """Return the verb for operations that have not ended although the run has."""
    return "stopped in" if info.interrupted else "still in"


def _names(names: list[str]) -> str:
    more = f" and {len(names) - 16:,} more" if len(names) > 16 else ""
    return ", ".join(names[:16]) + more


def clean(text: str) -> str:
    """Replace characters that XML or UTF-8 cannot encode."""
    return _INVALID.sub("\ufffd", text)
