"""The messages between workers, servers and scheduler, beat by beat, with a sentence for each.

A *beat* is a message on its way, an update, or a barrier. Acknowledgements are no beats.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

from distkit.events import Op
from distkit.views.scene.frame import Json, clean
from distkit.views.scene.units import human_bytes, human_seconds
from distkit.views.servers.story import Gradient, Place, Request, Story, Update
from distkit.views.servers.waits import Wait, listed


@dataclass(frozen=True, slots=True)
class Beat:
    """From ``src`` to ``dst``: when it begins and ends (None: never), and what of."""

    kind: str  # push, pull, weights, init, optimizer, register, book, update or barrier
    src: int
    dst: int
    begin: float
    end: float | None
    of: Request | Update | list[int]


def beats(story: Story) -> list[Beat]:
    """All beats in the order of their ends; what never ended comes last."""
    found = [*_messages(story)]
    found += [Beat("update", u.server, u.server, u.begin, u.end, u) for u in story.updates]
    for members in story.barriers:
        ends = [s.end for s in members]
        end = None if None in ends else max(e for e in ends if e is not None)
        first = min(members, key=lambda s: s.start)
        found.append(
            Beat(
                "barrier", first.rank, first.rank, first.start, end, sorted(s.rank for s in members)
            )
        )
    return sorted(found, key=lambda b: (b.end is None, b.end or b.begin, b.begin))


_KINDS = {Op.PUSH: "push", Op.PULL: "pull", Op.INIT: "init", Op.REGISTER: "register"}
_ANSWERS = {Op.PULL: "weights", Op.REGISTER: "book"}


def _messages(story: Story) -> Iterator[Beat]:
    for r in story.requests:
        kind = "optimizer" if r.optimizer else _KINDS[r.op]
        yield Beat(kind, r.node, r.server, r.sent, _after(r.sent, r.arrived), r)
        if r.left is not None and r.op in _ANSWERS and not r.refused:
            yield Beat(_ANSWERS[r.op], r.server, r.node, r.left, _after(r.left, r.back), r)


def _after(begin: float, end: float | None) -> float | None:
    """An end that is not before its begin."""
    return None if end is None else max(begin, end)


class Teller:
    """Puts beats into words.

    Args:
        story: of the run.
        waits: of the run.
        names: of the nodes.
    """

    def __init__(self, story: Story, waits: list[Wait], names: dict[int, str]) -> None:
        self.story, self.names, self.quorum = story, names, story.quorum
        self.held = {id(w.asked): w for w in waits if w.asked is not None}
        self.everybody = len(story.of("worker")) + len(story.of("server"))
        self.applied = {id(g.push): g.by for g in story.gradients}
        self.inbox: dict[Place, list[Gradient]] = {}
        for g in story.gradients:
            self.inbox.setdefault(g.push.place, []).append(g)
        self.came: dict[int, list[float]] = {}
        for r in story.requests:
            if r.op is Op.REGISTER and r.arrived is not None:
                self.came.setdefault(r.run, []).append(r.arrived)

    def name(self, node: int) -> str:
        """The name of a node."""
        return self.names.get(node, f"rank {node}")

    def told(self, beat: Beat) -> tuple[str, str]:
        """The sentence of a beat, and details."""
        say = getattr(self, f"_{beat.kind}")
        who, more = say(beat)
        size = human_bytes(n) if (n := nbytes(beat)) else ""
        if beat.end is None and isinstance(beat.of, Request):
            more = "not recorded by its server" if answered(beat) else "it has not arrived"
        return clean(who), clean(" · ".join(filter(None, [more, size])))

    def _push(self, beat: Beat) -> tuple[str, str]:
        r = beat.of
        assert isinstance(r, Request)
        more = "refused" if r.refused else f"computed from v{r.version}"
        if r.dropped:
            more += ": too late, not counted"
        elif not r.refused and r.arrived is not None and self.quorum.get(r.run, 1) > 1:
            here = self._lying(r.place, r.arrived)
            more += f" · {here} of {self.quorum[r.run]} have arrived"
        if r.alone:
            by = self.applied.get(id(r))
            more += f" · applied in v{by}" if by is not None else ""
            more += " · its worker has ended"
        return f"{self.name(r.node)} pushes its gradient of {r.key} to {self.name(r.server)}", more

    def _lying(self, place: Place, time: float) -> int:
        """The number of workers that have a gradient in the inbox just after a time."""
        mine = self.inbox.get(place, [])
        recent = mine[: bisect_right(mine, time, key=lambda g: g.arrived)][-256:]
        return len({g.push.node for g in recent if g.taken is None or g.taken > time})

    def _pull(self, beat: Beat) -> tuple[str, str]:
        r = beat.of
        assert isinstance(r, Request)
        wait = self.held.get(id(r))
        whom = wait.on(wait.begin) if wait else ()
        more = f"waits for the gradient of {listed(whom, self.names)}" if whom else ""
        if wait and not whom:
            more = "waits"
        return f"{self.name(r.node)} asks {self.name(r.server)} for {r.key}", more

    def _weights(self, beat: Beat) -> tuple[str, str]:
        r = beat.of
        assert isinstance(r, Request)
        wait = self.held.get(id(r))
        more = f"waited {human_seconds(wait.end - wait.begin)}" if wait else "answered at once"
        return f"{self.name(r.server)} sends {r.key} v{r.version} to {self.name(r.node)}", more

    def _init(self, beat: Beat) -> tuple[str, str]:
        r = beat.of
        assert isinstance(r, Request)
        does = "gives the first value of" if r.whole else "announces"
        wait = self.held.get(id(r))
        whom = wait.on(wait.begin) if wait else ()
        more = f"waits for {listed(whom, self.names)} to give it" if whom else ""
        return f"{self.name(r.node)} {does} {r.key} to {self.name(r.server)}", (
            "refused" if r.refused else more
        )

    def _optimizer(self, beat: Beat) -> tuple[str, str]:
        r = beat.of
        assert isinstance(r, Request)
        return f"{self.name(r.node)} sends {self.name(r.server)} an optimizer", r.optimizer

    def _register(self, beat: Beat) -> tuple[str, str]:
        r = beat.of
        assert isinstance(r, Request)
        here = sum(t <= (r.arrived or -math.inf) for t in self.came.get(r.run, ()))
        return f"{self.name(r.node)} registers with the scheduler", (
            f"{here} of {self.everybody} have registered"
        )

    def _book(self, beat: Beat) -> tuple[str, str]:
        return f"the scheduler sends {self.name(beat.dst)} the addresses of all nodes", ""

    def _update(self, beat: Beat) -> tuple[str, str]:
        u = beat.of
        assert isinstance(u, Update)
        late = [f"{self.name(w)} ({n} late)" if n else self.name(w) for w, n in u.late.items()]
        more = f"{len(late)} gradients" if len(late) > 8 else " + ".join(late)
        return f"{self.name(u.server)} updates {u.key} to v{u.version}", more and f"with {more}"

    def _barrier(self, beat: Beat) -> tuple[str, str]:
        members = beat.of
        assert isinstance(members, list)
        if beat.end is None:
            missing = sorted({*self.story.of("worker")} - {*members})
            return "barrier", f"waits for {listed(missing, self.names)}" if missing else ""
        return "all have passed the barrier", ""


def answered(beat: Beat) -> bool:
    """True if it is a request that was answered: it has arrived, even if nothing says when."""
    return isinstance(beat.of, Request) and beat.of.back is not None


def nbytes(beat: Beat) -> int:
    """The payload [bytes]."""
    r = beat.of
    if not isinstance(r, Request):
        return 0
    return r.nbytes_back if beat.kind == "weights" else 0 if beat.kind == "pull" else r.nbytes


def plain(beat: Beat, rows: dict[tuple[int, str], int], told: tuple[str, str]) -> Json:
    """A beat as the painters know it."""
    found: Json = {
        "kind": beat.kind,
        "src": beat.src,
        "dst": beat.dst,
        "begin": beat.begin,
        "end": beat.end,
        "who": told[0],
        "more": told[1],
    }
    if size := nbytes(beat):
        found["nbytes"] = size
    r = beat.of
    if not isinstance(r, list) and (r.server, r.key) in rows:
        found |= {"row": rows[r.server, r.key], "v": r.version}
    if isinstance(r, Request):
        found |= {"where": clean(r.where.rpartition("/")[2])} if r.where else {}
        lost = (r.refused and beat.kind in ("push", "init")) or (r.dropped and beat.kind == "push")
        found |= {"refused": True} if lost else {}
    return found
