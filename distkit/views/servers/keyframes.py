"""The keyframes of a run with a parameter server, and their captions.

A keyframe is a message in flight, an update, a barrier or a death; acknowledgements are left out.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from distkit._format import human_bytes, human_seconds
from distkit.events import Op, Span
from distkit.views.scene.frame import clean
from distkit.views.scene.summaries import written
from distkit.views.servers.history import Place, Request, ServerHistory, Update
from distkit.views.servers.waits import Death, Wait, listed


@dataclass(frozen=True, slots=True)
class Keyframe:
    """An event from ``src`` to ``dst``, with its times [s]; ``end`` is None if it never ended."""

    kind: str  # push, pull, weights, init, optimizer, register, book, update, barrier or death
    src: int
    dst: int
    begin: float
    end: float | None
    subject: Any  # a request, an update, the spans of a barrier, or a death

    @property
    def answered(self) -> bool:
        """True for an answered request, which arrived even if its arrival was not recorded."""
        return isinstance(self.subject, Request) and self.subject.back is not None

    @property
    def nbytes(self) -> int:
        """The payload [bytes]."""
        if not isinstance(self.subject, Request) or self.kind == "pull":
            return 0
        return self.subject.nbytes_back if self.kind == "weights" else self.subject.nbytes

    @property
    def value(self) -> str:
        """The values that it carries, if they are few."""
        carries = self.kind in ("push", "weights", "init", "update")
        return written(self.subject.value) if carries else ""

    @property
    def lost(self) -> bool:
        """True if the server refused its value or dropped it as late."""
        refused = self.kind in ("push", "init") and self.subject.refused
        return refused or (self.kind == "push" and self.subject.dropped)


def keyframes(history: ServerHistory, deaths: Iterable[Death] = ()) -> list[Keyframe]:
    """All keyframes in the order of their ends, followed by those that never ended."""
    found = [*_messages(history)]
    found += [Keyframe("update", u.server, u.server, u.begin, u.end, u) for u in history.updates]
    found += [Keyframe("death", d[0], d[0], d[1], d[1], d) for d in deaths]
    for members in history.barriers:
        ends = [s.end for s in members if s.end is not None]
        end = max(ends) if len(ends) == len(members) else None
        first = min(members, key=lambda s: s.start)
        found.append(Keyframe("barrier", first.rank, first.rank, first.start, end, members))
    return sorted(found, key=lambda b: (b.end is None, b.end or b.begin, b.begin))


_KINDS = {Op.PUSH: "push", Op.PULL: "pull", Op.INIT: "init", Op.REGISTER: "register"}
_ANSWERS = {Op.PULL: "weights", Op.REGISTER: "book"}


def _messages(history: ServerHistory) -> Iterator[Keyframe]:
    for r in history.requests:
        kind = "optimizer" if r.optimizer else _KINDS[r.op]
        yield Keyframe(kind, r.node, r.server, r.sent, _after(r.sent, r.arrived), r)
        if r.left is not None and r.op in _ANSWERS and not r.refused:
            yield Keyframe(_ANSWERS[r.op], r.server, r.node, r.left, _after(r.left, r.back), r)


def _after(begin: float, end: float | None) -> float | None:
    """The end, or the begin if the clocks put it earlier."""
    return None if end is None else max(begin, end)


class Captions:
    """The captions of a run's keyframes.

    Args:
        history: the history of the run.
        waits: the waits of the run.
        names: the names of the nodes by rank.
    """

    def __init__(
        self, history: ServerHistory, waits: Iterable[Wait], names: dict[int, str]
    ) -> None:
        self.history, self.names = history, names
        self.held = {id(w.asked): w for w in waits if w.asked is not None}
        self.members = len(history.of("worker")) + len(history.of("server"))
        self.quorum = history.quorum()
        self.inbox = defaultdict[Place, list[Request]](list)
        for g in history.gradients:
            self.inbox[g.place].append(g)
        self.registered = sorted(arrived for arrived, _, _ in history.present())

    def name(self, node: int) -> str:
        """The name of a node."""
        return self.names.get(node, f"rank {node}")

    def of(self, keyframe: Keyframe) -> tuple[str, str]:
        """A sentence and details."""
        sentence, more = getattr(self, f"_{keyframe.kind}")(keyframe.subject)
        if keyframe.end is None and isinstance(keyframe.subject, Request):
            more = "not recorded by its server" if keyframe.answered else "it has not arrived"
        size = human_bytes(keyframe.nbytes) if keyframe.nbytes else ""
        return clean(sentence), clean(" · ".join(filter(None, [more, size])))

    def _push(self, r: Request) -> tuple[str, str]:
        more = "refused" if r.refused else f"computed from v{r.version}"
        if r.dropped:
            more += ": too late, not counted"
        elif not r.refused and r.arrived is not None and self.quorum > 1:
            more += f" · {self._in_inbox(r.place, r.arrived)} of {self.quorum} have arrived"
        if r.alone:
            more += f" · applied in v{r.by}" if r.by is not None else ""
            more += " · its worker has ended"
        return f"{self.name(r.node)} pushes its gradient of {r.key} to {self.name(r.server)}", more

    def _in_inbox(self, place: Place, time: float) -> int:
        """The number of workers with a gradient in the inbox just after a time."""
        mine = self.inbox[place]
        recent = mine[: bisect_right(mine, time, key=lambda g: g.arrived or 0.0)][-256:]
        return len({g.node for g in recent if g.taken > time})

    def _awaited(self, r: Request, template: str) -> str:
        """The nodes that a request waits for when it arrives, in words."""
        wait = self.held.get(id(r))
        awaited = wait.on(wait.begin) if wait else ()
        return template.format(listed(awaited, self.names)) if awaited else ""

    def _pull(self, r: Request) -> tuple[str, str]:
        more = self._awaited(r, "waits for the gradient of {}") or "waits" * (id(r) in self.held)
        return f"{self.name(r.node)} asks {self.name(r.server)} for {r.key}", more

    def _weights(self, r: Request) -> tuple[str, str]:
        wait = self.held.get(id(r))
        more = f"waited {human_seconds(wait.end - wait.begin)}" if wait else "answered at once"
        return f"{self.name(r.server)} sends {r.key} v{r.version} to {self.name(r.node)}", more

    def _init(self, r: Request) -> tuple[str, str]:
        does = "gives the first value of" if r.whole else "announces"
        more = "refused" if r.refused else self._awaited(r, "waits for {} to give it")
        return f"{self.name(r.node)} {does} {r.key} to {self.name(r.server)}", more

    def _optimizer(self, r: Request) -> tuple[str, str]:
        return f"{self.name(r.node)} sends {self.name(r.server)} an optimizer", r.optimizer

    def _register(self, r: Request) -> tuple[str, str]:
        present = bisect_right(self.registered, -math.inf if r.arrived is None else r.arrived)
        more = f"{present} of {self.members} have registered"
        return f"{self.name(r.node)} registers with the scheduler", more

    def _book(self, r: Request) -> tuple[str, str]:
        return f"the scheduler sends {self.name(r.node)} the addresses of all nodes", ""

    def _update(self, u: Update) -> tuple[str, str]:
        late = [f"{self.name(w)} ({n} late)" if n else self.name(w) for w, n in u.late.items()]
        more = f"{len(late)} gradients" if len(late) > 8 else " + ".join(late)
        return f"{self.name(u.server)} updates {u.key} to v{u.version}", more and f"with {more}"

    def _death(self, death: Death) -> tuple[str, str]:
        node, _, replaced = death
        return (
            f"{self.name(node)} dies",
            "this is its last sign of life" if replaced is None else "another takes its place",
        )

    def _barrier(self, members: list[Span]) -> tuple[str, str]:
        if all(s.end is not None for s in members):
            return "all have passed the barrier", ""
        missing = sorted({*self.history.of("worker")} - {s.rank for s in members})
        return "barrier", f"waits for {listed(missing, self.names)}" if missing else ""
