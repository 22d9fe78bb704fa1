"""The view of a parameter server: keys on servers, pushes and pulls in flight, waits.

history.py and waits.py read the events, projection.py and keyframes.py combine and caption them,
scene.py makes the marks.
"""

from __future__ import annotations

from collections import Counter

from distkit._format import count, human_bytes
from distkit.trace.log import EventLog
from distkit.views.scene.frame import Json, flagged
from distkit.views.servers.layout import bin_counts
from distkit.views.servers.projection import Serving, facts, notes, notices, project
from distkit.views.servers.scene import NOTHING, draw
from distkit.views.widget.view import SceneView

MAX_ROWS = 24  # keys in the table


class Servers(SceneView):
    """Shows a run with a parameter server in trace time, message by message.

    Each server has its keys with their versions, and an inbox per key in which gradients wait for
    an update. A gradient carries the version that it was computed from; an update shows whose
    gradients it used, and how late they were. Arrows lead from a waiting worker to those
    it waits for. Space plays, arrow keys step through messages, page up and down through updates.

    Args:
        source: a :class:`~distkit.Trace`, or a run that has one.
        bare: whether to leave out the text and totals around the picture.

    Raises:
        TypeError: ``source`` has no trace.

    >>> from distkit.events import Event, Op, State
    >>> from distkit.trace.info import RankInfo, RunInfo
    >>> ranks = {0: RankInfo("worker", "worker"), 1: RankInfo("server", "server")}
    >>> facts = dict(attributes={"key": "w", "version": 1, "workers": (0,), "late": (0,)})
    >>> asked = dict(peer=1, attributes={"key": "w"}, match="kv:0:0", nbytes=8, dtype="float32")
    >>> Servers(EventLog([Event(0, 0, Op.PUSH, State.STARTED, 0.0, **asked),
    ...                Event(1, 0, Op.RECV, State.COMPLETED, 0.1, **asked | {"peer": 0}),
    ...                Event(1, 1, Op.MARK, State.STARTED, 0.1, **facts),
    ...                Event(1, 1, Op.MARK, State.COMPLETED, 0.2, **facts)],
    ...               RunInfo(ranks=ranks)))
    Servers: 1 worker, 1 server
      server: w v1 (8 B)
      1 push (8 B), 0 pulls (0 B), 1 update; gradients of staleness 0: 1
    """

    def _project(self, trace: EventLog) -> Json:
        self._run = project(trace, live=self._live)
        return draw(self._run)

    def __repr__(self) -> str:
        return to_table(self._run)


def to_table(run: Serving) -> str:
    """The end of a run as text: keys and their versions, waits, and counters."""
    lines = [f"{run.title}: {', '.join(facts(run))}".rstrip(": ")]
    if not run.keyframes:
        return f"{lines[0]}\n  {NOTHING}"
    lying = Counter(g.place for g in run.history.gradients if g.taken > run.end)
    for at, row in list(run.rows.items())[:MAX_ROWS]:
        here = [version for begin, end, (version, *_) in run.versions.get(at, ()) if end > run.end]
        version = f"v{here[-1]}" if here else "no value"
        size = ", ".join(filter(None, [human_bytes(row.nbytes), row.share]))
        inbox = f", {count(lying[at], 'gradient')} in the inbox" if lying[at] else ""
        lines.append(f"  {run.names[row.server]}: {row.key} {version} ({size}){inbox}")
    if len(run.rows) > MAX_ROWS:
        lines.append(f"  … and {len(run.rows) - MAX_ROWS:,} more keys")
    last = {node: stretches[-1][2] for node, stretches in run.doing.items()}
    lines += [f"  {run.names[n]} {s.text}" for n, s in last.items() if s.kind == "waits"]
    pushes, pulls = run.done("push"), run.done("weights")
    told = [
        "1 push" if len(pushes) == 1 else f"{len(pushes):,} pushes",
        f" ({human_bytes(sum(b.nbytes for b in pushes))}), ",
        f"{count(len(pulls), 'pull')} ({human_bytes(sum(b.nbytes for b in pulls))}), ",
        count(len(run.done("update")), "update"),
    ]
    late = bin_counts(run.staleness)
    lines.append("  " + "".join(told) + (f"; gradients of staleness {late}" if late else ""))
    told = flagged({"notices": notices(run), "notes": notes(run)})
    return "\n".join([*lines, *(f"  {line}" for line in told)])
