"""Simulates programs of communication calls under gloo, and records their events.

A program is a list of steps for each rank. A send and its receive complete together; a collective
completes when all members have called it.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from msgspec import structs

from distkit.events import COLLECTIVES, NO_ATTRIBUTES, WORLD, Event, Op, State
from distkit.trace.info import RankEnd, RunInfo
from distkit.trace.trace import Trace


@dataclass
class Step:
    """An operation or, with ``wait``, the wait for the request of an earlier step."""

    op: Op | None
    peer: int | None = None
    group: str = WORLD
    tag: int | None = None
    where: str = ""
    attributes: Mapping[str, Any] = NO_ATTRIBUTES
    nbytes: int = 12
    shape: tuple[int, ...] = (3,)
    dtype: str = "float32"
    is_async: bool = False  # isend, irecv: do not wait
    wait: Step | None = None

    def event(self, rank: int, seq: int, state: State, time: float, peer: int | None) -> Event:
        p2p = self.op in (Op.SEND, Op.RECV)
        empty = self.op in (Op.BARRIER, Op.NEW_GROUP)
        tensor = (0, (), "") if empty else (self.nbytes, self.shape, self.dtype)
        return Event(
            rank,
            seq,
            self.op,
            state,
            time,
            peer,
            self.group,
            *tensor,
            (self.tag or 0) if p2p else None,
            self.where,
            self.attributes,
        )


@dataclass(eq=False)
class Posted:
    """An operation in flight."""

    rank: int
    seq: int
    step: Step
    peer: int | None
    matched: bool = False
    done: bool = False
    blocked: bool = False


@dataclass
class Simulation:
    programs: list[list[Step]]
    groups: dict[str, list[int]] = field(default_factory=dict)
    random: random.Random = field(default_factory=lambda: random.Random(0))
    report_probability: float = 0.5  # probability that a wait is reported before it ends

    def __post_init__(self):
        n = len(self.programs)
        self.groups = {WORLD: list(range(n)), **self.groups}
        self.events, self.clock = [], 0.0
        self.at, self.seqs = [0] * n, [0] * n
        self.waits = [None] * n
        self.posted, self.by_step = [], {}
        self.calls = defaultdict(lambda: defaultdict(list))

    # -- one step ---------------------------------------------------------------

    def add_event(self, p, state):
        self.clock += 1e-5
        peer = p.peer if state is State.COMPLETED else p.step.peer
        self.events.append(p.step.event(p.rank, p.seq, state, self.clock, peer))

    def post(self, rank, step):
        p = Posted(rank, self.seqs[rank], step, step.peer)
        self.seqs[rank] += 1
        self.add_event(p, State.SCHEDULED)
        self.add_event(p, State.STARTED)
        self.by_step[rank, id(step)] = p
        if step.op in COLLECTIVES:
            self.calls[step.group][rank].append(p)
            self.match_collective(step.group, len(self.calls[step.group][rank]) - 1)
        else:
            self.posted.append(p)
            self.match(p)
        return p

    def match(self, p):
        """Match a send with the first unmatched receive of its tag and group, or vice versa."""
        for other in self.posted:
            if other.matched or other.step.op is p.step.op:
                continue
            send, recv = (p, other) if p.step.op is Op.SEND else (other, p)
            same = (send.step.group, send.step.tag) == (recv.step.group, recv.step.tag)
            if same and send.peer == recv.rank and recv.peer in (None, send.rank):
                send.matched = recv.matched = True
                recv.peer = send.rank
                return

    def match_collective(self, group, nth):
        rows = [self.calls[group][r] for r in self.groups[group]]
        if all(len(row) > nth for row in rows):
            column = [row[nth] for row in rows]
            if len({(p.step.op, p.step.peer) for p in column}) == 1:
                for p in column:
                    p.matched = True

    def ready(self, rank):
        wait = self.waits[rank]
        return wait.matched if wait is not None else self.at[rank] < len(self.programs[rank])

    def advance(self, rank):
        wait = self.waits[rank]
        if wait is not None:
            self.add_event(wait, State.COMPLETED)
            wait.done, self.waits[rank] = True, None
            return
        step = self.programs[rank][self.at[rank]]
        self.at[rank] += 1
        if step.wait is not None:
            self.waits[rank] = self.by_step[rank, id(step.wait)]
        else:
            p = self.post(rank, step)
            self.waits[rank] = None if step.is_async else p

    def block(self, rank):
        wait = self.waits[rank]
        if wait is not None and not wait.matched and not wait.blocked:
            self.add_event(wait, State.BLOCKED)
            wait.blocked = True

    # -- a whole run --------------------------------------------------------------

    def run(self, limit=100_000):
        """Run until no rank can continue, but advance ranks at most ``limit`` times."""
        for _ in range(limit):
            ready = [r for r in range(len(self.programs)) if self.ready(r)]
            if not ready:
                break
            self.advance(self.random.choice(ready))
            if self.random.random() < self.report_probability:
                self.block(self.random.randrange(len(self.programs)))
        return self

    @property
    def stuck(self):
        return [r for r, w in enumerate(self.waits) if w is not None and not w.matched]

    @property
    def info(self):
        return RunInfo(world_size=len(self.programs), groups=self.groups)

    def live(self):
        """Return the current trace, in which all waits and ends are reported."""
        for r in range(len(self.programs)):
            self.block(r)
        return Trace(self.events, structs.replace(self.info, ends=self.ends("")))

    def released(self):
        """Return the trace after the stuck ranks were released."""
        for r in self.stuck:
            self.block(r)
            self.add_event(self.waits[r], State.FAILED)
        return Trace(self.events, structs.replace(self.info, ends=self.ends("released")))

    def ends(self, stuck):
        returned = {
            r: self.waits[r] is None and self.at[r] == len(p) for r, p in enumerate(self.programs)
        }
        how = {r: "returned" if returned[r] else stuck for r in returned}
        return {r: RankEnd(h) for r, h in how.items() if h}


def line(n):
    return f"a.py:{n}"
