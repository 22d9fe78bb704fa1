"""Computes the names, lanes, totals and notices of a picture, for all projections."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

from distkit._format import count, human_bytes, human_seconds, joined
from distkit.events import COMPUTATION, State
from distkit.trace.calls import op_name
from distkit.trace.columns import Category
from distkit.trace.info import RunInfo, Traffic, clock_error, cross_host_traffic, hosts_if_several

#: At most MAX_LANES lanes are drawn; a notice states how many. At most MAX_UNRECORDED kinds of
#: unrecorded calls are reported.
MAX_LANES, MAX_UNRECORDED = 256, 3

_INVALID = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")

#: A JSON object, except that a timeline's arrays are bytes. All numbers are finite.
Json = dict[str, Any]


def notice_lines(picture: Json) -> list[str]:
    """Return the warnings and the notes as lines of text; warnings start with "! ".

    >>> notice_lines({"notices": ["2 lost"], "notes": ["9 are drawn"]})
    ['! 2 lost', '9 are drawn']
    """
    return [*(f"! {notice}" for notice in picture["notices"]), *picture["notes"]]


def name(info: RunInfo, rank: int) -> str:
    """Return the name of a rank."""
    return clean(info.rank(rank).name)


def lane(info: RunInfo, rank: int) -> Json:
    """Return the name, role, device and host of a rank."""
    known, display_name = info.rank(rank), name(info, rank)
    host = hosts_if_several(info).get(rank)
    renamed = display_name not in (f"rank {rank}", f"stage {rank}")
    details = applicable(
        (f"rank {rank}", renamed and known.role not in ("", "device")),
        (known.device, known.device not in ("", "cpu")),
    )
    result = {"rank": rank, "name": display_name, "role": known.role, "detail": dotted(details)}
    return result if host is None else {**result, "host": clean(host)}


def facts(info: RunInfo, ranks: int) -> list[str]:
    """Return the numbers of ranks and hosts, the backend and the device, without duplicates.

    >>> from distkit.trace.info import RankInfo
    >>> ranks = {0: RankInfo(role="worker"), 1: RankInfo(role="server")}
    >>> facts(RunInfo(ranks=ranks, backend="gloo"), 2)
    ['1 worker and 1 server', 'gloo']
    """
    roles = Counter(known.role for known in info.ranks.values())
    nodes = [count(roles[role], role) for role in ("worker", "server") if roles["server"]] or [
        count(ranks - roles["device"], "stage" if roles["stage"] else "rank")
    ]
    sizes = [joined(nodes)] if ranks else []
    if hosts := {*hosts_if_several(info).values()}:
        sizes.append(count(len(hosts), "host"))
    return [*sizes, *dict.fromkeys(filter(None, (info.backend, info.device)))]


def host_totals(info: RunInfo, hosts_traffic: Traffic) -> list[tuple[str, str, str]]:
    """Return the value, label and tooltip of each total of a run on several hosts.

    Args:
        info: metadata of the run.
        hosts_traffic: traffic by source and destination host.
    """
    if not (hosts := hosts_if_several(info)):
        return []
    messages, nbytes = cross_host_traffic(hosts_traffic)
    routes = (f"{a} → {b}: {human_bytes(n)}" for (a, b), (_, n) in hosts_traffic.items())
    label = f"between hosts · {count(messages, 'message')}"
    totals = [(human_bytes(nbytes), label, clean("\n".join(routes)))] if hosts_traffic else []
    if (error := clock_error(info)) is not None:
        offsets = (
            f"{name}: {clock.ahead:+.6f} s ± {human_seconds(clock.error or 0.0)}"
            for name, clock in info.clocks.items()
        )
        names = [*dict.fromkeys(hosts.values())]
        owners = joined(names) if len(names) < 5 else count(len(names), "host")
        label = clean(f"between the clocks of {owners}")
        totals.append((f"±{human_seconds(error)}", label, clean("\n".join(offsets))))
    return totals


def omissions(*limits: tuple[str, int, int], which: str = "first") -> list[str]:
    """Return a notice for each limit that is exceeded.

    Args:
        limits: the end of the sentence, the number of drawn items, and the total number.
        which: which items are drawn.

    >>> omissions(("ranks are drawn", 16, 1000), ("layers are drawn", 3, 3))
    ['the first 16 of 1,000 ranks are drawn']
    """
    return [
        f"the {which} {drawn:,} of {total:,} {text}"
        for text, drawn, total in limits
        if drawn < total
    ]


def omission_notices(info: RunInfo, operations: int, drawn: int, ranks: list[int]) -> list[str]:
    """Return notices about the limitations of a picture, such as missing events or ranks."""
    dropped = sum(info.dropped.values())
    lost = (
        f"{count(dropped, 'event')} dropped: the recorder's buffer was full, "
        "so operations may be missing here"
    )
    unrecorded = sum(map(Counter, info.unrecorded.values()), Counter[str]())
    lanes = sum(rank < MAX_LANES for rank in ranks)
    return [
        *[lost] * bool(dropped),
        *(limit.text for limit in info.limitations.values()),
        *(f"{text} ({count(n, 'time')})" for text, n in unrecorded.most_common(MAX_UNRECORDED)),
        *(
            omissions(("ranks are drawn; the totals include all", lanes, len(ranks)))
            or omissions(("operations are drawn; the totals include all", drawn, operations))
        ),
    ]


def unfinished(opened: Iterable[tuple[int, Category]], info: RunInfo) -> list[str]:
    """Return notices about a stopped run, and about operations that never ended."""
    open_calls: dict[str, list[str]] = defaultdict(list)
    stopped = ["the run was stopped"] if info.interrupted else []
    for rank, category in sorted(opened, key=lambda item: item[0]):
        if category.op not in COMPUTATION:
            open_verb = "died in" if info.died(rank) else unfinished_verb(info)
            verb = "paused before" if category.state is State.SCHEDULED else open_verb
            open_calls[f"{verb} {op_name(category)}"].append(name(info, rank))
    return [
        *stopped,
        *(f"{call}: {_names([*dict.fromkeys(names)])}" for call, names in open_calls.items()),
    ]


def unfinished_verb(info: RunInfo) -> str:
    """Return the verb for operations that were still open when the run ended."""
    return "stopped in" if info.interrupted else "still in"


def _names(names: list[str]) -> str:
    return ", ".join(names[:16]) + f" and {len(names) - 16:,} more" * (len(names) > 16)


def dotted(parts: Iterable[str]) -> str:
    """Return the parts that are not empty, separated by dots.

    >>> dotted(["4 ranks", "", "gloo"])
    '4 ranks · gloo'
    """
    return clean(" · ".join(filter(None, parts)))


def applicable(*texts: tuple[str, object]) -> list[str]:
    """Return the texts whose condition is true.

    >>> applicable(("2 messages", 2), ("0 collectives", 0))
    ['2 messages']
    """
    return [text for text, condition in texts if condition]


def clean(text: str) -> str:
    """Replace characters that XML or UTF-8 cannot encode."""
    return _INVALID.sub("\ufffd", text)
