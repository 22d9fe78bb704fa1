"""A parameter server at work: keys on servers, pushes and pulls under way, who waits for whom.

What happened is read in story.py and waits.py, projection.py makes it plain data, scene.py marks.
"""

from __future__ import annotations

from distkit.trace.log import EventLog
from distkit.views.scene.frame import Json
from distkit.views.scene.units import count, human_bytes
from distkit.views.servers.projection import project
from distkit.views.servers.scene import NOTHING, draw
from distkit.views.servers.staleness import said
from distkit.views.servers.state import at, counts
from distkit.views.widget.view import SceneView

MAX_ROWS = 24  # keys that are written in the table


class Servers(SceneView):
    """Shows a run with a parameter server in trace time, message by message.

    Each server has its keys with their versions, and an inbox per key in which gradients wait for
    an update. A gradient carries the version that it was computed from; an update shows whose
    gradients it used, and how late they were. Arrows lead from a waiting worker to those
    it waits for. Space plays, arrow keys step through messages, page up and down through updates.

    Args:
        source: a :class:`~distkit.Trace`, or a run that has one.

    Raises:
        TypeError: ``source`` has no trace.

    >>> from distkit.events import Event, Op, State
    >>> roles = {r: {"name": n, "role": n} for r, n in enumerate(("worker", "server"))}
    >>> facts = dict(attributes={"key": "w", "version": 1, "workers": (0,), "late": (0,)})
    >>> asked = dict(peer=1, attributes={"key": "w"}, match="kv:0:0:0", nbytes=8, dtype="float32")
    >>> Servers(EventLog([Event(0, 0, Op.PUSH, State.STARTED, 0.0, **asked),
    ...                Event(1, 0, Op.RECV, State.COMPLETED, 0.1, **asked | {"peer": 0}),
    ...                Event(1, 1, Op.MARK, State.STARTED, 0.1, **facts),
    ...                Event(1, 1, Op.MARK, State.COMPLETED, 0.2, **facts)],
    ...               {"ranks": roles}))
    Servers: 1 worker, 1 server
      server: w v1 (8 B)
      1 push (8 B), 0 pulls (0 B), 1 update; gradients of staleness 0: 1
    """

    def _project(self, trace: EventLog) -> Json:
        self._run = project(trace, live=self._live)
        return draw(self._run)

    def __repr__(self) -> str:
        return to_table(self._run)


def to_table(run: Json) -> str:
    """For a terminal, at the end: keys and their versions, who waits for whom, the counters."""
    p, now = run, at(run, run["end"])
    names = {rank: name for rank, _, name in p["lanes"]}
    lines = [f"{p['title'] or 'Servers'}: {', '.join(p['facts'])}".rstrip(": ")]
    if not p["beats"]:
        return f"{lines[0]}\n  {NOTHING}"
    for row, state in list(zip(p["rows"], now.rows, strict=True))[:MAX_ROWS]:
        version = "no value" if state.version is None else f"v{state.version}"
        part = ", part {} of {}".format(*row["part"]) if row["part"] else ""
        here = f", {count(len(state.slots), 'gradient')} in the inbox" if state.slots else ""
        server = names.get(row["server"], f"rank {row['server']}")
        size = f"({human_bytes(row['nbytes'])}{part})"
        lines.append(f"  {server}: {row['key']} {version} {size}{here}")
    if len(p["rows"]) > MAX_ROWS:
        lines.append(f"  … and {len(p['rows']) - MAX_ROWS:,} more keys")
    lines += [
        f"  {names.get(node, node)} {text}"
        for node, (kind, text, _) in now.status.items()
        if kind == "waits"
    ]
    sums = counts(p)
    late = said(p["staleness"], sums["late"])
    pushes = "1 push" if sums["pushes"] == 1 else f"{sums['pushes']:,} pushes"
    told = [
        f"{pushes} ({human_bytes(sums['there'])})",
        f"{count(sums['pulls'], 'pull')} ({human_bytes(sums['back'])})",
        count(sums["updates"], "update"),
    ]
    lines.append("  " + ", ".join(told) + (f"; gradients of staleness {late}" if late else ""))
    return "\n".join([*lines, *(f"  ! {notice}" for notice in p["notices"])])
