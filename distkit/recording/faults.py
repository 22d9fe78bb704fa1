"""Fault injection: stragglers, slow links and killed ranks, without root privileges.

Faults are injected in a callback of the tap, before an operation is passed to the backend, and
before each call to a KVStore.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from numbers import Integral

from distkit._format import count, ordinal
from distkit.events import Op
from distkit.recording import recorder


class LeaveFunction(BaseException):
    """Raised to end a rank's function as if it had returned."""


@dataclass(frozen=True)
class Faults:
    """The faults to inject; see :func:`inject_faults`."""

    delay: Mapping[int, float] = field(default_factory=dict)
    latency: float = 0.0
    bandwidth: float = math.inf
    kill: Mapping[int, int] = field(default_factory=dict)

    def check(self, ranks: int, servers: int = 0) -> None:
        """Check that all ranks with faults exist.

        Raises:
            ValueError: a rank does not exist.
        """
        if unknown := {*self.delay, *self.kill} - set(range(ranks)):
            raise ValueError(
                f"dk.inject_faults got rank {min(unknown)}, but the ranks are 0 to {ranks - 1}."
                f"{f' {_KILL_SERVERS_HINT}' if servers else ''}"
            )


class FaultInjector:
    """Injects one rank's faults in one run; call it before each communication operation."""

    def __init__(self, faults: Faults, rank: int) -> None:
        self._faults, self._rank, self._calls = faults, rank, 0

    def __call__(self, op: Op, nbytes: int) -> None:
        """Inject the faults due before the next communication operation."""
        plan, rank = self._faults, self._rank
        if self._calls == plan.kill.get(rank):
            os.kill(os.getpid(), signal.SIGKILL)
        self._calls += 1
        link_cost = 0.0 if op is Op.RECV else plan.latency + nbytes / plan.bandwidth
        pause = plan.delay.get(rank, 0.0) + link_cost
        if pause:
            time.sleep(pause)

    def missed(self) -> list[str]:
        """Return a list with one warning if the rank should have been killed, and [] otherwise."""
        n = self._faults.kill.get(self._rank)
        if n is None:
            return []
        return [
            f"dk.inject_faults(kill={{{self._rank}: {n}}}) had no effect: rank {self._rank} ran "
            f"only {count(self._calls, 'communication operation')}, and the fault occurs before "
            f"its {ordinal(n + 1)}. Pass a smaller number, or run more communication operations."
        ]


@contextmanager
def inject_faults(
    *,
    delay: Mapping[int, float] | None = None,
    latency: float = 0.0,
    bandwidth: float | None = None,
    kill: Mapping[int, int] | None = None,
) -> Iterator[None]:
    """Inject faults into every run that starts inside the ``with`` block.

    The sender of a message and every member of a collective pay the cost of the link: the rank is
    busy for ``latency + nbytes / bandwidth`` seconds before the operation starts.

    Each call to a KVStore (``init``, ``push``, ``pull``, ``barrier`` or ``set_optimizer``) counts
    as one communication operation of the worker, with the total size of its keys' arrays.
    ``pushpull`` counts as two operations.

    Args:
        delay: ``{rank: seconds}`` makes the rank a straggler: each of its communication operations
            is delayed by this time.
        latency: seconds added to each communication operation except receives.
        bandwidth: bytes per second of a link, or None for no limit.
        kill: ``{rank: n}`` kills the rank's process before its (n + 1)-th communication
            operation.

    Raises:
        ValueError: a value is out of range or not a number.
        RuntimeError: the caller is a rank.

    Example:
        >>> with inject_faults(delay={2: 0.2}):
        ...     pass                                 # cluster.run(train)
    """
    if recorder.current() is not None:
        raise RuntimeError(
            "dk.inject_faults was called on a rank, after the run had started. Put the with block "
            "around cluster.run(...) in the notebook."
        )
    plan = Faults(
        {} if delay is None else delay,
        latency,
        math.inf if bandwidth is None else bandwidth,
        {} if kill is None else kill,
    )
    _check(plan)
    _current.append(plan)
    try:
        yield
    finally:
        _current.remove(plan)


#: The faults of the enclosing ``with`` blocks, innermost last; the first entry injects none.
_current = [Faults()]


def current() -> Faults:
    """Return the faults for runs that start now."""
    return _current[-1]


#: Remedy for faults on processes that are not ranks.
_KILL_SERVERS_HINT = (
    "Servers and the scheduler are not ranks: to kill one during a run, use "
    "os.kill(pid, signal.SIGKILL) with the pid from cluster.status()."
)


def _check(plan: Faults) -> None:
    for name, value in (("delay", plan.delay), ("kill", plan.kill)):
        if not isinstance(value, Mapping):
            raise ValueError(
                f"dk.inject_faults({name}={value!r}) does not name a rank. Pass {{2: {value!r}}}."
            )
        if invalid := [key for key in value if not isinstance(key, Integral)]:
            raise ValueError(
                f"dk.inject_faults({name}=…) got the key {invalid[0]!r}. Pass the number of a "
                f"rank, or of a worker if there are servers: {{1: {value[invalid[0]]!r}}}. "
                f"{_KILL_SERVERS_HINT}"
            )
    if numbers := [n for n in plan.kill.values() if not isinstance(n, int) or n < 0]:
        raise ValueError(
            f"dk.inject_faults(kill=…) expects integers ≥ 0, such as {{1: 3}}, not {numbers}."
        )
    seconds = [plan.latency, *plan.delay.values()]
    if wrong := [x for x in seconds if not isinstance(x, (int, float)) or not 0 <= x < math.inf]:
        raise ValueError(
            "dk.inject_faults expects finite numbers of seconds ≥ 0 for latency and delay, "
            f"not {wrong}."
        )
    if not (isinstance(plan.bandwidth, (int, float)) and plan.bandwidth > 0):
        raise ValueError(
            f"dk.inject_faults expects a bandwidth > 0 in bytes per second, not {plan.bandwidth}."
        )
