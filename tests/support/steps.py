"""A stepper without processes, which simulates scripts of operations."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from traces import MS, summary

from distkit.diagnosis.rank_state import RankState, RankStatus, WaitForGraph
from distkit.errors import RunError
from distkit.events import Event, Op, State
from distkit.trace.info import RankEnd, RankInfo, RunInfo
from distkit.trace.trace import Trace

Call = dict[str, Any]


@dataclass(frozen=True)
class Moment:
    events: int
    time: float
    choice: tuple[int, ...]
    rank_states: tuple[RankState, ...]


@dataclass(frozen=True)
class FakeFinding:
    """The fields of a finding that the cockpit uses."""

    message: str
    remedy: str
    hang: bool
    lines: dict[int, str]
    kind: str = "recv_cycle"
    code: str = "DK101"


class FakeStepper:
    """A stepper through ``scripts``: for each rank, the fields of the events of its calls."""

    def __init__(self, name: str, scripts: list[list[Call]], sources: dict[str, str]) -> None:
        self.name, self.scripts, self.sources = name, scripts, sources
        self.ranks = list(range(len(scripts)))
        self.playing, self.findings, self.error = False, [], ""
        self.calls: list[tuple[str, Any]] = []
        self.ends: dict[int, RankEnd] = {}
        self.info_fields: dict[str, Any] = {}  # other fields of the trace's info
        self.rank_infos: dict[int, RankInfo] = {}
        self._graph, self._events = WaitForGraph(len(scripts)), []
        self._clock, self._next, self._in_call = 4711.0, [-1] * len(scripts), {}
        self._watchers, self._readers = [], []
        self.moments, self.position = [], 0
        for rank in self.ranks:
            self._arrive(rank)
        self._add_moment(())

    # -- for live views -------------------------------------------------------------

    @property
    def trace(self) -> Trace:
        info = RunInfo(
            name=self.name,
            world_size=len(self.ranks),
            backend="gloo",
            ends=self.ends,
            ranks=self.rank_infos,
            sources=self.sources,
            **self.info_fields,
        )
        return Trace(self._events, info)

    @property
    def finished(self) -> bool:
        return all(
            s.status
            in (RankStatus.FINISHED, RankStatus.FAILED, RankStatus.DIED, RankStatus.STOPPED)
            for s in self._graph.rank_states
        )

    def subscribe(self, callback):
        self._readers.append(callback)
        return lambda: self._readers.remove(callback)

    def watch(self, callback):
        self._watchers.append(callback)
        return lambda: self._watchers.remove(callback)

    # -- commands ---------------------------------------------------------------------

    def next(self, rank: int | None = None) -> None:
        self.calls.append(("next", rank))
        paused = [s.rank for s in self._graph.rank_states if s.status is RankStatus.PAUSED]
        chosen = paused if rank is None else [r for r in paused if r == rank]
        if not chosen:
            raise RunError(f"{self._graph.rank_state(rank or 0)}. Let another rank go first.")
        for r in chosen:
            self._add_event(r, State.STARTED, "before")
        for r in chosen:
            self._add_event(r, State.BLOCKED)
            self._in_call[r] = True
        self._complete()
        self._add_moment(tuple(chosen))

    def play(self, speed: float = 1.0) -> None:
        self.calls.append(("play", speed))
        self.playing, looking_back = True, self.position < len(self.moments) - 1
        while self.position < len(self.moments) - 1:  # replay the past moments
            self.seek(self.position + 1)
        ready = lambda: any(s.status is RankStatus.PAUSED for s in self._graph.rank_states)  # noqa: E731
        while not looking_back and self.playing and ready():
            self.next()
        self.playing = False
        self._changed()

    def pause(self) -> None:
        self.calls.append(("pause", None))
        self.playing = False

    def finish(self) -> None:
        self.position = len(self.moments) - 1
        self.play(math.inf)

    def back(self, n: int = 1) -> None:
        self.seek(self.position - n)

    def seek(self, position: int) -> None:
        self.calls.append(("seek", position))
        self.position = min(max(position, 0), len(self.moments) - 1)
        self._changed()

    def fail(self, error: str, rank: int, text: str, where: str, how: str = "raised") -> None:
        """Fail one rank and release the others."""
        self.error = error
        self.ends = {r: RankEnd("released") for r in self.ranks}
        self.ends[rank] = RankEnd(how, text, where)
        for r, end in self.ends.items():
            self._graph.end(r, end.how, end.text)
        self._add_moment(())

    # -- internal -----------------------------------------------------------------------

    def _arrive(self, rank: int) -> None:
        self._next[rank] += 1
        if self._next[rank] == len(self.scripts[rank]):
            self._graph.end(rank, "returned")
        else:
            self._add_event(rank, State.SCHEDULED, "before")

    def _add_event(self, rank: int, state: State, values: str = "") -> None:
        self._clock += 0.07 * MS
        call = dict(self.scripts[rank][self._next[rank]])
        caller = call.pop("caller", None)
        if caller and state is State.SCHEDULED:
            call["attributes"] = {"caller": caller}
        seen = {"before": call.pop("before", None), "after": call.pop("after", None)}.get(values)
        event = Event(
            rank,
            self._next[rank],
            call.pop("op"),
            state,
            self._clock,
            **call,
            summary=summary(seen) if seen else None,
        )
        self._events.append(event)
        self._graph.feed([event])
        for reader in list(self._readers):
            reader([event])

    def _complete(self) -> None:
        """Complete the calls that can return, and continue their ranks."""
        while met := [
            r for r in self._in_call if self._graph.rank_state(r).status is RankStatus.RUNNING
        ]:
            for r in met:
                self._add_event(r, State.COMPLETED, "after")
            for r in met:
                del self._in_call[r]
                self._arrive(r)

    def _add_moment(self, choice: tuple[int, ...]) -> None:
        self.moments = [
            *self.moments,
            Moment(len(self._events), self._clock, choice, tuple(self._graph.rank_states)),
        ]
        self.position = len(self.moments) - 1
        self._changed()
        if self.finished:
            for reader in list(self._readers):
                reader([])

    def _changed(self) -> None:
        for watcher in list(self._watchers):
            watcher()


# -- programs ------------------------------------------------------------------------------

RING = '''\
def ring_all_reduce(x: Tensor) -> None:
    """Sum ``x`` over all ranks, in place. Same contract as ``dist.all_reduce``.

    Patarasuk & Yuan, 2009: 2(n-1) rounds of K/n bytes per rank.
    """
    rank, n = dist.get_rank(), dist.get_world_size()
    left, right = (rank - 1) % n, (rank + 1) % n
    chunks = x.view(-1).tensor_split(n)  # views: writing a chunk writes x

    for s in range(n - 1):  # reduce-scatter
        out, into = chunks[(rank - s) % n], chunks[(rank - s - 1) % n]
        buffer = torch.empty_like(into)
        if rank % 2:
            dist.recv(buffer, src=left)
            dist.send(out, dst=right)
        else:
            dist.send(out, dst=right)
            dist.recv(buffer, src=left)
        into += buffer
'''

CELL = """\
from collectives import ring_all_reduce

def fn():
    x = torch.linspace(-1, 1, 64) * (rank + 1)
    ring_all_reduce(x)
    dist.barrier()
    print(f"rank {rank} holds {x.sum():.2f}")
    return x
"""

CYCLE = """\
def swap():
    mine, theirs = torch.full((4,), rank), torch.zeros(4)
    if rank == 0:
        dist.recv(theirs, src=1)
        dist.send(mine, dst=1)
    else:
        dist.recv(theirs, src=0)
        dist.send(mine, dst=0)
    return theirs
"""


def ring(n: int = 4, size: int = 64) -> FakeStepper:
    """Return a stepper through a ring reduce-scatter with values, and a barrier."""
    k = size // n
    x = [[(-1 + 2 * i / (size - 1)) * (r + 1) for i in range(size)] for r in range(n)]
    scripts: list[list[Call]] = [[] for _ in range(n)]
    tensor = dict(nbytes=4 * k, shape=(k,), dtype="float32", tag=0)
    for s in range(n - 1):
        part = lambda r, c: slice((c % n) * k, (c % n + 1) * k)  # noqa: E731
        out = [x[r][part(r, r - s)] for r in range(n)]
        for r in range(n):
            odd, left, right = r % 2, (r - 1) % n, (r + 1) % n
            send = dict(
                op=Op.SEND,
                peer=right,
                before=out[r],
                after=out[r],
                where=f"collectives.py:{15 if odd else 17}",
                **tensor,
            )
            recv = dict(
                op=Op.RECV,
                peer=left,
                before=[0.0] * k,
                after=out[left],
                where=f"collectives.py:{14 if odd else 18}",
                **tensor,
            )
            scripts[r] += [recv, send] if odd else [send, recv]
        for r in range(n):
            into = part(r, r - s - 1)
            x[r][into] = [a + b for a, b in zip(x[r][into], out[(r - 1) % n], strict=True)]
    for script in scripts:
        script.append(dict(op=Op.BARRIER, where="In[5]:6"))
    return FakeStepper("fn", scripts, {"In[5]": CELL, "collectives.py": RING})


def ring_from_cell() -> FakeStepper:
    """Return the same stepper, with the calls inside distkit's ``ring_all_reduce``."""
    stepper = ring()
    scripts = [
        [{**call, "caller": "In[5]:5"} if ":6" not in call["where"] else call for call in script]
        for script in stepper.scripts
    ]
    return FakeStepper("fn", scripts, stepper.sources)


def cycle() -> FakeStepper:
    """Return a stepper through two ranks that wait for each other."""
    tensor = dict(nbytes=16, shape=(4,), dtype="float32", tag=0)
    scripts = [
        [
            dict(
                op=Op.RECV,
                peer=1 - r,
                where=f"In[7]:{4 + 3 * r}",
                before=[0.0] * 4,
                after=[1.0 - r] * 4,
                **tensor,
            ),
            dict(op=Op.SEND, peer=1 - r, where=f"In[7]:{5 + 3 * r}", before=[r] * 4, **tensor),
        ]
        for r in (0, 1)
    ]
    return FakeStepper("swap", scripts, {"In[7]": CYCLE})


FINDING = FakeFinding(
    "rank 0 waits in recv(src=1) at In[7]:4, rank 1 waits in recv(src=0) at In[7]:7: "
    "each waits for the other.",
    "Let one of them send first.",
    True,
    {0: "In[7]:4", 1: "In[7]:7"},
)
