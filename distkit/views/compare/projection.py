"""Compares several traces as plain data: the figures of each, and their differences.

``project`` compares whole traces. A :class:`Side` is one trace of a comparison.
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
#: Ratio of run times below which they count as equal.
CLOSE = 1.1
#: Figures that are unknown if all messages of a run are inside its backend.
OF_MESSAGES = ("messages", "message_bytes", "between_bytes", "most_sent", "rounds")

#: Key, name, unit and description of each figure. Units: s, B, n (a number), % (a fraction).
ROWS = [
    ("seconds", "total time", "s", "from the first event to the last"),
    ("messages", "messages", "n", "point-to-point messages and requests that were sent"),
    ("message_bytes", "bytes in messages", "B", "total of all messages"),
    ("between_bytes", "bytes between hosts", "B", "of messages from one host to another"),
    (
        "collectives",
        "collectives",
        "n",
        "the backend's collectives; the messages inside them are not recorded",
    ),
    ("collective_bytes", "bytes in collectives", "B", "the tensor of each collective, once"),
    ("most_sent", "most bytes sent by a rank", "B", "in messages, by the rank that sent the most"),
    (
        "rounds",
        "rounds",
        "n",
        "consecutive exchanges, if each rank sends and receives "
        "one message at a time; a collective counts as one",
    ),
    (
        "busy",
        "in communication",
        "%",
        "share of the time that ranks spend in sends, receives, collectives and requests, "
        "including waiting for others; mean of the ranks",
    ),
    (
        "waiting",
        "waiting",
        "%",
        "share of the time that ranks spend only waiting for others; mean of the ranks, "
        "without the barrier at the end",
    ),
]
#: Note on fractions of time with a parameter server.
OF_WORKERS = "mean of the workers, without servers and scheduler"


def project(traces: Mapping[str, EventLog]) -> Json:
    """Return the comparison of whole traces by name, without bars and arrows."""
    return summary([Side(name, trace).data for name, trace in traces.items()])


class Side:
    """One trace of a comparison.

    Args:
        name: name of the trace.
        trace: the trace so far.
        live: whether its run is in progress.
    """

    def __init__(self, name: str, trace: EventLog, live: bool = False) -> None:
        self.name, self.live, self.trace = name, live, trace
        self.start = float(trace.table.time.min()) if len(trace) else 0.0
        self.columns = Columns(trace, live=live)
        self.data = about(name, trace, self.columns, live=live)


def about(name: str, trace: EventLog, columns: Columns, *, live: bool = False) -> Json:
    """Return the figures and metadata of one trace."""
    frame, values = columns.frame, figures(columns)
    facts = [*dict.fromkeys([*frame["facts"], *["simulated"] * trace.info.simulated])]
    duration = [human_seconds(values["seconds"])] if values["seconds"] else []
    return {
        "name": clean(name),
        "live": live,
        "empty": not len(trace),
        "heading": " · ".join([clean(name), *facts, *duration, *["live"] * live]),
        "figures": values,
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
    """Return one name per rank for all runs; names such as "worker 1" take precedence."""
    known = [(r["rank"], r["name"]) for run in runs for r in run["figures"]["ranks"]]
    known.sort(key=lambda pair: pair[1] != f"rank {pair[0]}")
    return dict(known)


def _relative_times(runs: Sequence[Json]) -> list[str]:
    """Return a sentence about times relative to the first run; [] if all are equal."""
    seconds = [float(run["figures"]["seconds"]) for run in runs]
    unknown = any(run["live"] or run["empty"] for run in runs) or not all(seconds)
    if len(runs) < 2 or unknown or max(seconds) / min(seconds) < CLOSE:
        return []
    base, *names = (run["name"] for run in runs)
    times = [ratio(time, seconds[0]).replace("=", "1×") for time in seconds[1:]]
    others = "".join(f", {name} {n}" for name, n in zip(names[1:], times[1:], strict=True))
    return [f"{names[0]} took {times[0]} as long as {base}{others}."]


def _has_server(runs: Sequence[Json]) -> bool:
    """Return True if any run has a parameter server."""
    return any(r["role"] == WORKER for run in runs for r in run["figures"]["ranks"])


def _facts(runs: Sequence[Json]) -> list[str]:
    """Return the run times as text, or [] until all runs have ended."""
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
            continue  # runs with requests have no rounds
        if workers and key == "most_sent":
            label, hint = "most sent by a worker", hint.replace("rank", WORKER)
        of_messages = key in OF_MESSAGES
        values = [
            None if of_messages and _has_hidden_messages(run) else run["figures"].get(key)
            for run in runs
        ]
        known = sum(v not in (0, None) for v in values)
        if known > (key == "collective_bytes") or key in ("seconds", "messages"):
            yield {"key": key, "label": label, "unit": unit, "hint": hint, "values": values}


def _has_hidden_messages(run: Json) -> bool:
    """Return True if all messages of a run are inside its backend, thus not recorded."""
    return not run["figures"]["messages"] and bool(run["figures"]["collectives"])


def _notes(runs: Sequence[Json]) -> Iterator[str]:
    """Yield the notices that are not warnings."""
    hidden = [run["name"] for run in runs if _has_hidden_messages(run)]
    if hidden and any(run["figures"]["messages"] for run in runs):
        yield f"{joined(hidden)}: messages inside the backend's collectives are not recorded."
    yield from (f"{run['name']}: {note}" for run in runs for note in run["notes"])


def _notices(runs: Sequence[Json]) -> Iterator[str]:
    for run in runs:
        if run["empty"] and not run["live"]:
            yield f"{run['name']}: nothing was recorded"
    sizes = {run["name"]: len(run["figures"]["ranks"]) for run in runs if not run["empty"]}
    if len(set(sizes.values())) > 1:
        parts = (f"{name} {count(n, 'rank')}" for name, n in sizes.items())
        yield f"the world sizes differ: {'; '.join(parts)}"
    yield from _notes(runs)
    for run in runs:
        warnings = (notice for notice in run["notices"] if notice not in run["notes"])
        yield from (f"{run['name']}: {notice}" for notice in warnings)


def to_table(picture: Json) -> str:
    """Return a table for terminals, with a line per figure and a column per trace."""
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


WORKER = "worker"  # role of a rank in runs with a parameter server


def figures(columns: Columns) -> Json:
    """Return the figures of a run: seconds, bytes, counts, and fractions of time from 0 to 1.

    With a parameter server, ``busy`` and ``waiting`` are means over the workers, because idle
    servers lose no time. :mod:`distkit.views.timeline.waits` defines waiting; the final barrier
    does not count.
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
    """Return a value as a multiple of the baseline.

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
    """Return the difference between a value and the baseline as text.

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

    In a round, a rank sends and receives at most one message, and sends only data from earlier
    rounds. A collective is one round. A ring all-reduce of n ranks has 2(n-1) rounds.
    """
    known: dict[int, int] = defaultdict(int)  # the last round whose result a rank has
    sent: dict[int, int] = defaultdict(int)
    received: dict[int, int] = defaultdict(int)
    depth: dict[int, int] = defaultdict(int)
    for begins, rank, item in _exchanges(columns):
        if begins:
            depth[item] = sent[rank] = max(depth[item], 1 + max(known[rank], sent[rank]))
            continue
        if item >= 0:  # messages are received one at a time
            depth[item] = received[rank] = max(depth[item], 1 + received[rank])
        known[rank] = max(known[rank], depth[item])
    return max(depth.values(), default=0)


def _exchanges(columns: Columns) -> list[tuple[int, int, int]]:
    """Return starts (1) and ends (0) in time order, each with its rank and item.

    Messages have the items 0, 1, …, collectives -1, -2, …
    """
    ops, pairs = columns.ops, columns.pairs
    sent = np.flatnonzero((pairs.send >= 0) & ~np.isnan(pairs.sent))
    received = sent[(pairs.recv[sent] >= 0) & ~np.isnan(pairs.received[sent])]
    entered = np.flatnonzero((pairs.tie >= 0) & ~ops.scheduled)
    left = entered[ops.ended[entered]]
    time = np.concatenate(
        [pairs.sent[sent], ops.start[entered], pairs.received[received], ops.end[left]]
    )
    begins = np.arange(len(time)) < len(sent) + len(entered)
    rank = ops.rank[np.concatenate([pairs.send[sent], entered, pairs.recv[received], left])]
    item = np.concatenate([sent, -1 - pairs.tie[entered], received, -1 - pairs.tie[left]])
    order = np.lexsort((begins, time))
    facts = (begins.astype(np.int64), rank, item)
    return list(zip(*(fact[order].tolist() for fact in facts), strict=True))
