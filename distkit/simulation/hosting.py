"""A parameter server whose workers and servers are processes of one machine. Pure.

They have no links, they have processors that they share. A round is a push of m bytes and the pull
of what came of it. One alone takes a(m) seconds. Of these, d(m) seconds are spent where others may
be in the way: at the P processors, which have w(m) seconds of work for it, or, if that is longer,
at the busiest of S servers, which has s(m) seconds for it::

    d = l · max(w / P, s / S)

l ≥ 1 is what a full machine loses by waking processes up, and to whatever else it does. Who finds
q others there takes a + d·q. If all n come at once, as in synchronous training, the last one finds
q = n − 1. If each goes round by itself, q is what mean value analysis says of n − 1 others::

    t(n) = a + d·q(n − 1)            q(0) = 0,   q(n) = n·d·(1 + q(n − 1)) / t(n)

so that one takes a, and many take n·d each. a, w, s and l are measured at a few sizes m with one
server: a with one worker, the others with several at once. A process that computes on a processor
is one more that is always found there.

Source: Reiser and Lavenberg, "Mean-value analysis of closed multichain queuing networks", 1980.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from distkit.events import Op
from distkit.simulation.fitting import along
from distkit.simulation.game import Game
from distkit.simulation.network import Floats, Link


@dataclass(frozen=True)
class Host:
    """A machine, as a parameter server's messages were measured on it.

    Args:
        processors: how many its processes share.
        sizes: bytes of a push, and of the pull after it; rising, shape (k,).
        alone: seconds of such a round when nothing else is under way, shape (k,).
        work: processor seconds of a round, of all processes together, shape (k,).
        served: those of them that its server takes, shape (k,).
        loss: how many times longer many rounds take than processors or servers need, shape (k,).
        computes: whether workers compute on these processors, or on a device of their own.

    Raises:
        ValueError: no processor, sizes that do not rise, or something that is not positive.

    Example:
        >>> host = Host(2, (0, 1000), (3.0, 4.0), (2.0, 4.0), (1.0, 1.0), (1.0, 1.0))
        >>> [round(host.seconds(1000, workers), 2) for workers in (1, 2, 64)]
        [4.0, 5.0, 128.0]
        >>> host.seconds(1000, 2, together=True)
        6.0
    """

    processors: int
    sizes: Sequence[float]
    alone: Sequence[float]
    work: Sequence[float]
    served: Sequence[float]
    loss: Sequence[float]
    computes: bool = True

    def __post_init__(self) -> None:
        measured = np.array([self.alone, self.work, self.served, self.loss], float)
        rising = len(self.sizes) > 1 and bool((np.diff(self.sizes) > 0).all())
        if self.processors < 1 or not rising or not (measured > 0).all():
            raise ValueError(
                f"a host with {self.processors} processors, measured at sizes {self.sizes} as "
                f"{measured.tolist()}: give a processor, two rising sizes, and positive seconds"
            )

    @classmethod
    def of(
        cls,
        processors: int,
        workers: int,
        alone: dict[int, float],
        crowd: dict[int, float],
        work: dict[int, float],
        served: dict[int, float],
    ) -> Host:
        """From what was measured with one server, by size.

        Args:
            processors: how many there are.
            workers: how many there were in the ``crowd``.
            alone: seconds of a round of one worker.
            crowd: seconds of a round of each of all workers at once.
            work: processor seconds of a round then, of all processes.
            served: those of the server.
        """
        bound = {
            m: max(alone[m], workers * work[m] / processors, workers * served[m]) for m in alone
        }
        loss = [max(1.0, crowd[m] / bound[m]) for m in alone]
        a, w, s = ([table[m] for m in alone] for table in (alone, work, served))
        return cls(processors, tuple(alone), a, w, s, loss)

    def seconds(
        self,
        nbytes: float,
        workers: int = 1,
        *,
        computing: int = 0,
        share: float = 1.0,
        together: bool = False,
    ) -> float:
        """Seconds of a round.

        Args:
            nbytes: pushed, and pulled.
            workers: n, whose rounds are under way.
            computing: processes that use a processor meanwhile.
            share: of the bytes that the busiest server has, 1/S if they are spread evenly.
            together: the rounds begin at once.
        """
        alone, work, served, loss = (
            float(along(np.array(float(nbytes)), np.array(self.sizes, float), np.array(times)))
            for times in (self.alone, self.work, self.served, self.loss)
        )
        queued = min(alone, loss * max(work / self.processors, served * share))
        if together:
            return alone + queued * (workers - 1 + computing)
        found, took = 0.0, alone
        for n in range(1, workers + 1):
            took = alone + queued * (found + computing)
            found = n * queued * (1 + found) / took
        return took


class Hosted(Game):
    """Workers and servers on one host: whatever is under way at a moment shares it evenly."""

    def __init__(self, workers: int, load: Floats, host: Host, *rules: Any) -> None:
        super().__init__(workers, load, Link(0, 0), *rules)
        self.host, self.nbytes = host, float(load.sum())
        self.share = float(load.max()) / self.nbytes if self.nbytes else 1 / len(load)
        self.jobs: dict[int, _Job] = {}  # by worker
        self.clock, self.plans = 0.0, 0

    def _pull(self, time: float, w: int, j: int) -> None:
        self.pulled[w] = self.version
        self._begin(_Job("pull", self.step[w], time), time, w)

    def _compute(self, time: float, w: int, j: int) -> None:
        if self.host.computes:
            self._begin(_Job("compute", self.step[w], time, self._drawn(w)), time, w)
        else:
            super()._compute(time, w, j)

    def _push(self, time: float, w: int, j: int) -> None:
        self._begin(_Job("push", self.step[w], time), time, w)

    def _begin(self, job: _Job, time: float, w: int) -> None:
        self._go_on(time)
        self.jobs[w] = job
        self._plan(time)

    def _go_on(self, time: float) -> None:
        """The work done since the last change."""
        for job, seconds in self._paces():
            job.left -= (time - self.clock) / seconds if seconds else job.left
        self.clock = time

    def _paces(self) -> list[tuple[_Job, float]]:
        """Seconds that each job would take as things are; a push and a pull are half a round."""
        computing = sum(job.what == "compute" for job in self.jobs.values())
        under_way = len(self.jobs)
        crowded = max(1.0, under_way / self.host.processors)
        rounds = under_way - computing
        half = (
            self.host.seconds(
                self.nbytes,
                rounds,
                computing=computing,
                share=self.share,
                together=not self.staleness,
            )
            / 2
        )
        return [
            (job, job.seconds * crowded if job.what == "compute" else half)
            for job in self.jobs.values()
        ]

    def _plan(self, time: float) -> None:
        """Look at whatever is done first when it is done, unless something changes before."""
        self.jobs = {w: job for w, job in self.jobs.items() if job.step == self.step[w]}
        self.plans += 1
        ends = [
            (time + job.left * seconds, w)
            for w, (job, seconds) in zip(self.jobs, self._paces(), strict=True)
        ]
        if ends:
            end, w = min(ends)
            self._next(end, w, "done", self.plans)

    def _done(self, time: float, w: int, plan: int) -> None:
        if plan != self.plans:
            return
        self._go_on(time)
        job = self.jobs.pop(w)
        if job.what == "compute":
            self._note(w, Op.MARK, job.begun, time, attributes={"step": job.step})
            self._next(time, w, "push", 0)
        else:
            if self.record:
                for s in range(self.servers):
                    self._message(Op(job.what), w, s, job.begun, job.begun, time)
            if job.what == "pull":
                self._next(time, w, "compute", 0)
            else:
                self._applied(time, w)
        self._plan(time)


@dataclass
class _Job:
    """A worker's current action: a pull, a computation of so many seconds, a push."""

    what: str
    step: int
    begun: float
    seconds: float = 0.0
    left: float = 1.0  # of the whole
