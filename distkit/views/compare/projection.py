"""Comparison of several traces as plain data: the figures of each, and their differences.

``project`` compares whole traces. A :class:`Side` is one trace of the comparison.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from distkit._format import aligned, count, human_bytes, human_seconds, joined
from distkit.trace.hosts import between
from distkit.trace.log import EventLog
from distkit.views.scene.frame import Json, clean, flagged
from distkit.views.timeline.columns import Columns

MAX_NOTICES = 6
#: Ratio below which run times count as equal.
CLOSE = 1.1
#: Figures that are unknown if all messages of a run are internal to its backend.
OF_MESSAGES = ("messages", "message_bytes", "between_bytes", "most_sent", "rounds")

#: Key, name, unit and description of each figure. Units: s, B, n (a number), % (a fraction).
ROWS = [
    ("seconds", "total time", "s", "from the first event to the last"),
    ("messages", "messages", "n", "point-to-point messages and requests that were sent"),
    ("message_bytes", "bytes in messages", "B", "of all messages together"),
    ("between_bytes", "bytes between hosts", "B", "of the messages from one host to another"),
    (
        "collectives",
        "collectives",
        "n",
        "the backend's collectives; the messages inside them are not recorded",
    ),
    ("collective_bytes", "bytes in collectives", "B", "the tensor of each collective, once"),
    ("most_sent", "most bytes sent by a rank", "B", "in messages, by the rank that sent most"),
    (
        "rounds",
        "rounds",
        "n",
        "consecutive exchanges, when a rank sends "
        "one message and receives one at a time; a collective counts as one",
    ),
    (
        "busy",
        "in communication",
        "%",
        "share of the time that ranks spend in sends, receives, collectives and requests, "
        "waiting for others included; mean of the ranks",
    ),
    (
        "waiting",
        "waiting",
        "%",
        "share of the time that ranks spend only waiting for others, mean of the ranks; "
        "the barrier at the end does not count",
    ),
]
#: Note on fractions of time with a parameter server.
OF_WORKERS = "mean of the workers, without servers and scheduler"


def project(traces: Mapping[str, EventLog]) -> Json:
    """Return the comparison of whole traces by name, without bars and arrows."""
    return summary([Side(name, trace).told for name, trace in traces.items()])


class Side:
    """One trace of a comparison.

    Args:
        name: its name.
        trace: its trace so far.
        live: whether its run is in progress.
    """

    def __init__(self, name: str, trace: EventLog, live: bool = False) -> None:
        self.name, self.live, self.trace = name, live, trace
        self.start = float(trace.table.time.min()) if len(trace) else 0.0
        self.columns = Columns(trace, live=live)
        self.told = about(name, trace, self.columns, live=live)


def about(name: str, trace: EventLog, columns: Columns, *, live: bool = False) -> Json:
    """Return the figures and metadata of one trace."""
    frame, found = columns.frame, figures(columns)
    facts = [*dict.fromkeys([*frame["facts"], *["simulated"] * trace.info.simulated])]
    took = [human_seconds(found["seconds"])] if found["seconds"] else []
    return {
        "name": clean(name),
        "live": live,
        "empty": not len(trace),
        "heading": " · ".join([clean(name), *facts, *took, *["live"] * live]),
        "figures": found,
        "notices": [] if live else frame["notices"],
        "notes": [] if live else frame["notes"],
    }


def summary(runs: Sequence[Json]) -> Json:
    """Return the comparison of several traces with the first."""
    first = _relative_times(runs)
    return {
        "title": joined([run["name"] for run in runs]),
        "facts": _facts(runs),
        "live": any(run["live"] for run in runs),
        "runs": list(runs),
        "rows": list(_rows(runs)),
        "notices": [*first, *_notices(runs)][:MAX_NOTICES],
        "notes": [*first, *_notes(runs)],
    }


def names(runs: Sequence[Json]) -> dict[int, str]:
    """Return one name per rank for all runs, such as "worker 1" if any run has it."""
    known = [(r["rank"], r["name"]) for run in runs for r in run["figures"]["ranks"]]
    known.sort(key=lambda pair: pair[1] != f"rank {pair[0]}")
    return dict(known)


def _relative_times(runs: Sequence[Json]) -> list[str]:
    """Return a sentence on the others' times relative to the first's; [] if all are equal."""
    seconds = [float(run["figures"]["seconds"]) for run in runs]
    unknown = any(run["live"] or run["empty"] for run in runs) or not all(seconds)
    if len(runs) < 2 or unknown or max(seconds) / min(seconds) < CLOSE:
        return []
    base, *names = (run["name"] for run in runs)
    times = [ratio(time, seconds[0]).replace("=", "1×") for time in seconds[1:]]
    more = "".join(f", {name} {n}" for name, n in zip(names[1:], times[1:], strict=True))
    return [f"{names[0]} took {times[0]} as long as {base}{more}."]


def _has_server(runs: Sequence[Json]) -> bool:
    """Return True if any run has a parameter server."""
    return any(r["role"] == WORKER for run in runs for r in run["figures"]["ranks"])


def _facts(runs: Sequence[Json]) -> list[str]:
    """Return the run times as text, once all runs have ended."""
    if len(runs) > 4 or any(run["live"] or run["empty"] for run in runs):
        return []
    return [f"{run['name']} took {human_seconds(run['figures']['seconds'])}" for run in runs]


def _rows(runs: Sequence[Json]) -> Iterator[Json]:
    workers = _has_server(runs)
    for key, label, unit, hint in ROWS:
        if workers and unit == "%":
            label, hint = (
                f"workers {label}",
                hint.replace("mean of the ranks", OF_WORKERS).replace("ranks", "workers"),
            )
        if workers and key == "rounds":
            continue  # rounds are undefined for runs with requests
        if workers and key == "most_sent":
            label, hint = "most sent by a worker", hint.replace("rank", WORKER)
        sent = key in OF_MESSAGES
        values = [
            None if sent and _has_hidden_messages(run) else run["figures"].get(key) for run in runs
        ]
        some = sum(v not in (0, None) for v in values)
        if some > (key == "collective_bytes") or key in ("seconds", "messages"):
            yield {"key": key, "label": label, "unit": unit, "hint": hint, "values": values}


def _has_hidden_messages(run: Json) -> bool:
    """Return True if all messages of a run are internal to its backend and unrecorded."""
    return not run["figures"]["messages"] and bool(run["figures"]["collectives"])


def _notes(runs: Sequence[Json]) -> Iterator[str]:
    """Yield the notices that report no problem."""
    said = [run["name"] for run in runs if _has_hidden_messages(run)]
    if said and any(run["figures"]["messages"] for run in runs):
        yield f"{joined(said)}: messages inside the backend's collectives are not recorded."
    yield from (f"{run['name']}: {note}" for run in runs for note in run["notes"])


def _notices(runs: Sequence[Json]) -> Iterator[str]:
    for run in runs:
        if run["empty"] and not run["live"]:
            yield f"{run['name']}: nothing was recorded"
    sizes = {run["name"]: len(run["figures"]["ranks"]) for run in runs if not run["empty"]}
    if len(set(sizes.values())) > 1:
        told = (f"{name} {count(n, 'rank')}" for name, n in sizes.items())
        yield f"the world sizes differ: {'; '.join(told)}"
    yield from _notes(runs)
    for run in runs:
        warnings = (notice for notice in run["notices"] if notice not in run["notes"])
        yield from (f"{run['name']}: {notice}" for notice in warnings)


def to_table(picture: Json) -> str:
    """Return a table for terminals: a line per figure, a column per trace."""
    base, *others = (run["name"] for run in picture["runs"])
    lines = [["", base, *(cell for name in others for cell in (name, ""))]]
    for row in picture["rows"]:
        first, *rest = row["values"]
        cells = [row["label"], figure(first, row["unit"])]
        for value in rest:
            cells += [figure(value, row["unit"]), ratio(value, first)]
        lines.append(cells)
    state = "still running" if picture["live"] else ", ".join(picture["facts"])
    parts = [f"Compare: {state or picture['title']}", *(f"  {line}" for line in aligned(lines))]
    return "\n".join(parts + [f"  {line}" for line in flagged(picture)])


WORKER = "worker"  # a rank's role where there is a parameter server


def figures(columns: Columns) -> Json:
    """Return the figures of a run: seconds, bytes, counts, and fractions of time from 0 to 1.

    With a parameter server ``busy`` and ``waiting`` are means over the workers: idle servers lose
    no time. Waiting is defined in :mod:`distkit.views.timeline.causes`; the final barrier does not
    count.
    """
    frame = columns.frame
    ranks = [{key: lane[key] for key in _OF_A_RANK} for lane in frame["lanes"]]
    workers = [r for r in ranks if r["role"] == WORKER] or ranks
    seconds = (frame["end"] or 0.0) - (frame["start"] or 0.0)
    return {
        "seconds": seconds,
        **{
            key: frame[key]
            for key in ("messages", "message_bytes", "collectives", "collective_bytes")
        },
        "between_bytes": between(columns.traffic)[1],
        "most_sent": max((r["bytes"] for r in workers), default=0),
        "rounds": rounds(columns),
        "busy": _mean([r["busy"] for r in workers]),
        "waiting": _mean([r["waiting"] for r in workers]),
        "ranks": ranks,
    }


_OF_A_RANK = ("rank", "name", "role", "busy", "waiting", "messages", "bytes")


def _mean(parts: list[float]) -> float:
    return round(sum(parts) / len(parts), 4) if parts else 0.0


def ratio(value: float | None, base: float | None) -> str:
    """Return a value as a multiple of the baseline's.

    >>> ratio(3, 2), ratio(2, 2), ratio(0, 2), ratio(2, 0), ratio(2, 2**20), ratio(2048, 1)
    ('1.5×', '=', '0×', '', '<0.001×', '2,048×')
    """
    if value is None or not base:
        return ""
    if value == base:
        return "="
    times = value / base
    if 0 < abs(times) < 0.001:
        return "<0.001×"
    return f"{times:,.0f}×" if abs(times) >= 100 else f"{times:.2g}×"


def difference(value: float | None, base: float | None, unit: str) -> str:
    """Return the difference of a value from the baseline's as text.

    >>> difference(3, 2, "n"), difference(0.1, 0.3, "s"), difference(None, 2, "n")
    ('+1', '−200 ms', '')
    """
    if value is None or base is None:
        return ""
    return f"{'−' if value < base else '+'}{figure(abs(value - base), unit)}"


def figure(value: float | None, unit: str) -> str:
    """Format a value with its unit.

    >>> figure(0.25, "s"), figure(4096, "B"), figure(0.251, "%"), figure(None, "n")
    ('250 ms', '4 KiB', '25 %', '–')
    """
    if value is None:
        return "–"
    match unit:
        case "s":
            return human_seconds(value)
        case "B":
            return human_bytes(value)
        case "%":
            return f"{100 * value:.0f} %"
        case _:
            return f"{value:,}"


# -- rounds --------------------------------------------------------------------------


def rounds(columns: Columns) -> int:
    """Return the number of consecutive exchanges.

    In a round a rank sends and receives at most one message, and sends only data from earlier
    rounds; a collective is one round. The ring all-reduce has 2(n-1).
    """
    known: dict[int, int] = defaultdict(int)  # the last round whose result a rank has
    sent: dict[int, int] = defaultdict(int)
    received: dict[int, int] = defaultdict(int)
    depth: dict[int, int] = defaultdict(int)
    for begins, rank, item in _exchanges(columns):
        if begins:
            depth[item] = sent[rank] = max(depth[item], 1 + max(known[rank], sent[rank]))
            continue
        if item >= 0:  # a message: received one at a time
            depth[item] = received[rank] = max(depth[item], 1 + received[rank])
        known[rank] = max(known[rank], depth[item])
    return max(depth.values(), default=0)


def _exchanges(columns: Columns) -> list[tuple[int, int, int]]:
    """Return starts (1) and ends (0) sorted by time, each with its rank and item.

    Messages are numbered from 0, collectives are -1, -2 …
    """
    ops, pairs = columns.ops, columns.pairs
    gone = np.flatnonzero((pairs.send >= 0) & ~np.isnan(pairs.sent))
    come = gone[(pairs.recv[gone] >= 0) & ~np.isnan(pairs.received[gone])]
    into = np.flatnonzero((pairs.tie >= 0) & ~ops.scheduled)
    out = into[ops.ended[into]]
    time = np.concatenate([pairs.sent[gone], ops.start[into], pairs.received[come], ops.end[out]])
    begins = np.arange(len(time)) < len(gone) + len(into)
    rank = ops.rank[np.concatenate([pairs.send[gone], into, pairs.recv[come], out])]
    item = np.concatenate([gone, -1 - pairs.tie[into], come, -1 - pairs.tie[out]])
    order = np.lexsort((begins, time))
    facts = (begins.astype(np.int64), rank, item)
    return list(zip(*(fact[order].tolist() for fact in facts), strict=True))
