"""Simulate synchronous, asynchronous and bounded-staleness parameter servers. No side effects.

A server or worker sends at most one message and receives at most one at a time, so messages queue.
The model covers machines connected by links, but not processes that share the cores of one machine.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from distkit.consistency import Asynchronous, Rule, Synchronous
from distkit.events import Op
from distkit.trace.info import Consistency, RankInfo
from distkit.trace.trace import Trace
from distkit_simulation.network import Floats, Link, check_link
from distkit_simulation.simulator import Delay, Stragglers, Writer


@dataclass
class ParameterServerResult:
    """The result of :func:`parameter_server`.

    ``finished`` lists the time at which each gradient arrived at all servers [s], ``workers`` lists
    the worker that computed each gradient, and ``staleness`` lists the number of gradients applied
    since that worker's pull (0 if synchronous). ``waited`` is the time that each worker waited [s].
    """

    finished: list[float] = field(default_factory=list)
    workers: list[int] = field(default_factory=list)
    staleness: list[int] = field(default_factory=list)
    waited: Floats = field(default_factory=lambda: np.zeros(0))
    trace: Trace = field(default_factory=Trace)

    @property
    def seconds(self) -> float:
        """The time at which the last gradient arrived at all servers [s]."""
        return max(self.finished, default=0.0)


class Simulation:
    """A discrete-event simulation of workers and servers."""

    def __init__(
        self,
        workers: int,
        load: Floats,
        link: Link,
        steps: int,
        staleness: float,
        seed: int,
        record: bool,
        compute: Delay,
        slow: Floats,
    ) -> None:
        self.workers, self.servers, self.load = workers, len(load), load
        self.steps, self.staleness = steps, staleness
        bound = int(staleness) if math.isfinite(staleness) else None
        self.rule: Rule = Asynchronous(bound) if staleness else Synchronous()
        self.durations: list[float] = link.seconds(load).tolist()
        self.gamma = (link.gamma * load).tolist()
        self.rng, self.record = np.random.default_rng(seed), record
        self.compute, self.slow = compute, slow
        self.receiving_until, self.sending_until = [0.0] * self.servers, [0.0] * self.servers
        self.step, self.pulled_versions = [0] * workers, [0] * workers
        self.version = 0  # number of gradients applied so far, from all workers
        self.arrivals: list[list[int]] = [[] for _ in range(steps)]  # workers, by step
        self.updates = 0
        self.wait_starts: dict[int, float] = {}  # worker -> start of its wait
        self.held_pulls: dict[tuple[int, int], tuple[float, str]] = {}  # by worker and server
        # time, tie-breaker, worker, event, number of servers that the worker has contacted
        self.heap: list[tuple[float, int, int, str, int]] = []
        self.sequence = itertools.count()
        self.writer = Writer(workers + self.servers)
        self.result = ParameterServerResult(waited=np.zeros(workers))

    def run(self) -> ParameterServerResult:
        """Run the simulation."""
        for w in range(self.workers):
            self._push_event(0.0, w, "pull", 0)
        while self.heap:
            time, _, w, kind, j = heapq.heappop(self.heap)
            getattr(self, f"_{kind}")(time, w, j)
        self.result.trace = self._trace()
        return self.result

    def _push_event(self, time: float, w: int, kind: str, j: int) -> None:
        heapq.heappush(self.heap, (time, next(self.sequence), w, kind, j))

    def _pull(self, time: float, w: int, j: int) -> None:
        if j == 0:
            self.pulled_versions[w] = self.version
        end = self._transfer(Op.PULL, time, w, j, self.sending_until)
        self._push_event(end, w, *(("pull", j + 1) if j + 1 < self.servers else ("compute", 0)))

    def _compute(self, time: float, w: int, j: int) -> None:
        duration = float(self.slow[w] * self.compute(self.rng, (1,))[0])
        self._record(w, Op.MARK, time, time + duration, attributes={"step": self.step[w]})
        self._push_event(time + duration, w, "push", 0)

    def _push(self, time: float, w: int, j: int) -> None:
        if j == self.servers:
            self._apply_gradient(time, w)
        else:
            end = self._transfer(Op.PUSH, time, w, j, self.receiving_until)
            self._push_event(end, w, "push", j + 1)

    def _transfer(self, op: Op, time: float, w: int, j: int, busy: list[float]) -> float:
        """Send a message between worker ``w`` and its j-th server; return the end time."""
        s = (w + j) % self.servers
        begin = max(time, busy[s])
        end = float(begin + self.durations[s])
        busy[s] = end + (self.gamma[s] if op is Op.PUSH else 0.0)
        if self.record:
            self._record_message(op, w, s, time, begin, end)
        return end

    def _apply_gradient(self, time: float, w: int) -> None:
        """Process a gradient that has arrived at all servers."""
        step = self.step[w]
        self.result.finished.append(time)
        self.result.workers.append(w)
        staleness = self.version - self.pulled_versions[w] if self.staleness else 0
        self.result.staleness.append(staleness)
        self.version += 1
        self.arrivals[step].append(w)
        self.step[w] += 1
        self.wait_starts[w] = time
        if self.rule.complete(self.arrivals[step], range(self.workers)):
            self._record_update(
                time, self.arrivals[step] if self.rule.has_rounds else [w], staleness
            )
        self._resume(time)

    def _resume(self, time: float) -> None:
        """Start the next step of the workers that may continue."""
        slowest = min(self.step)
        for w, start in list(self.wait_starts.items()):
            if self.step[w] == self.steps:
                continue
            if slowest >= self.rule.required_clock(self.step[w]):
                del self.wait_starts[w]
                self.result.waited[w] += time - start
                self._push_event(time, w, "pull", 0)
            elif start == time:
                self._record_held_pull(time, w, w % self.servers)

    # -- the trace ----------------------------------------------------------------------

    def _record_update(self, time: float, workers: Sequence[int], staleness: int) -> None:
        """Record, on every server, an update with these workers' gradients, as the KVStore does."""
        self.updates += 1
        sources = {"workers": tuple(sorted(workers)), "stale_by": (staleness,) * len(workers)}
        for s in range(self.servers):
            self._record(
                self.workers + s,
                Op.MARK,
                time,
                time + self.gamma[s],
                attributes={"key": f"shard{s}", "version": self.updates, **sources},
            )

    def _record_held_pull(self, time: float, w: int, s: int) -> None:
        """Record the arrival of a pull that the server holds back."""
        match = self._new_match(Op.PULL)
        self.held_pulls[w, s] = time, match
        self._record(
            self.workers + s, Op.RECV, time, time, peer=w, **self._message_fields(s, match)
        )

    def _record_message(
        self, op: Op, w: int, s: int, requested: float, begin: float, end: float
    ) -> None:
        """Record a request at the worker, and its arrival and reply at the server."""
        peer, held = self.workers + s, self.held_pulls.pop((w, s), None)
        start, match = held or (requested, self._new_match(op))
        fields = self._message_fields(s, match)
        arrival, reply = (begin, end) if op is Op.PULL else (end, end)
        self._record(w, op, start, end, peer=peer, **fields)
        if held is None:
            self._record(peer, Op.RECV, arrival, arrival, peer=w, **fields)
        self._record(peer, Op.SEND, arrival, reply, peer=w, **fields)

    def _new_match(self, op: Op) -> str:
        return f"{op}:{len(self.writer.events)}"

    def _message_fields(self, s: int, match: str) -> dict[str, Any]:
        """Return the fields of a message to or from a server."""
        nbytes = int(self.load[s])
        return {
            "nbytes": nbytes,
            "shape": (nbytes // 4,),
            "dtype": "float32",
            "match": match,
            "attributes": {"key": f"shard{s}"},
        }

    def _record(self, rank: int, op: Op, begin: float, end: float, **fields: Any) -> None:
        if self.record:
            self.writer.add_operation(op, rank, begin, end, **fields)

    def _trace(self) -> Trace:
        roles = ["worker"] * self.workers + ["server"] * self.servers
        ranks = {
            r: RankInfo(
                f"{role} {r if role == 'worker' else r - self.workers}",
                role,
                host="simulated",
            )
            for r, role in enumerate(roles)
        }
        rule = self.rule
        consistency = Consistency(
            "dist_sync" if rule.has_rounds else "dist_async", rule.staleness, rule.backup
        )
        return self.writer.trace("parameter server", ranks=ranks, consistency=consistency)


def assign_tensors(tensors: Sequence[int], servers: int) -> Floats:
    """Assign each tensor to the server with the fewest bytes; return the bytes per server.

    ``tf_cnn_benchmarks`` assigns variables in this way. With many servers, the largest tensor
    determines the load. MXNet splits large tensors; to model this, pass the sizes of the parts.

    >>> assign_tensors([8, 4, 3, 2], 2)
    array([8., 9.])
    """
    if servers < 1:
        raise ValueError(f"servers must be at least 1; got {servers}")
    load = np.zeros(servers)
    for nbytes in tensors:
        load[np.argmin(load)] += nbytes
    return load


def parameter_server(
    workers: int,
    tensors: Sequence[int],
    servers: int,
    link: Link,
    compute: Delay | float,
    *,
    steps: int = 1,
    staleness: float = 0,
    stragglers: Stragglers | None = None,
    seed: int = 0,
    record: bool = True,
) -> ParameterServerResult:
    """Simulate training with a parameter server.

    Args:
        workers: the number of workers; their ranks precede the servers' ranks.
        tensors: the size of each parameter array in bytes, assigned by :func:`assign_tensors`.
        servers: the number of servers.
        link: the link between workers and servers.
        compute: the compute time of a step [s], or a function that draws it.
        steps: the number of steps of each worker.
        staleness: the number of steps by which a worker may be ahead of the slowest worker. 0 is
            synchronous (``dist_sync``), infinity is asynchronous (``dist_async``), and a value in
            between bounds the staleness.
        stragglers: workers whose computation is slower; jitter is ignored.
        seed: the seed for all random draws.
        record: whether to record a trace.

    Raises:
        ValueError: ``workers``, ``servers`` or ``steps`` is less than 1, or ``staleness`` is
            negative.

    Source:
        Li et al., OSDI 2014; Ho et al. (bounded), NIPS 2013.

    Example:
        >>> free = Link(0, 0)
        >>> parameter_server(4, [400], 1, free, 1.0, steps=3).seconds
        3.0
    """
    check_link(link)
    if workers < 1 or steps < 1:
        raise ValueError(f"workers and steps must be at least 1; got {workers} and {steps}")
    if staleness < 0:
        raise ValueError(f"staleness must be at least 0 steps; got {staleness}")
    load = assign_tensors(tensors, servers)
    draw = compute if callable(compute) else lambda rng, shape: np.full(shape, compute)
    slow = (stragglers or Stragglers()).factors(workers)
    return Simulation(workers, load, link, steps, staleness, seed, record, draw, slow).run()
