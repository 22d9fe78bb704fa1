"""Align the clocks of several hosts so that no message is received before it was sent.

No side effects.

If one host sends a message at s and another receives it at r, each by its own clock, the receiver's
clock minus the sender's is less than r - s. Sums of such bounds along paths between hosts bound the
difference between any two clocks. The estimate is the midpoint of the bounds.

Offsets are assumed to be constant. Clocks that drift apart during a run slightly violate this
assumption; the bounds are then widened, which increases the error of the estimate.

Source: Halpern, Megiddo and Munshi, 1985; Patt-Shamir and Rajsbaum, 1994.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from distkit.events import Op, Span, State
from distkit.trace.info import ClockOffset, hosts_if_several
from distkit.trace.log import EventLog, Log

#: Minimum duration of a message between hosts [s]; it exceeds the clocks' rounding errors.
MIN_DURATION = 1e-8
#: Amounts by which bounds may be widened to allow for drift [s]; the first sufficient one is used.
_SLACKS = 0.0, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1


class ClocksDisagree(ValueError):
    """The times of messages contradict each other by more than drift can explain."""


class CrossHostMessage(NamedTuple):
    """A message from one host to another, with the local time at each end [s].

    ``sent`` may be too early and ``received`` too late, but not vice versa.
    """

    src: str
    sent: float
    dst: str
    received: float


def align(
    hosts: Mapping[str, float], messages: Iterable[CrossHostMessage]
) -> dict[str, ClockOffset]:
    """Estimate the offset of each host's clock from the first host's.

    Args:
        hosts: the assumed offset of each host's clock from the first host's [s], for example from
            wall clocks; used if messages do not bound the offset from both sides.
        messages: messages between the hosts; a round trip counts as two.

    Returns:
        The offset of each host. Its error is None if messages do not bound it from both sides.

    Raises:
        ClocksDisagree: the messages contradict each other.

    >>> round_trip = [CrossHostMessage("a", 1.0, "b", 6.2), CrossHostMessage("b", 7.0, "a", 2.2)]
    >>> b = align({"a": 0.0, "b": 0.0}, round_trip)["b"]
    >>> round(b.ahead, 2), round(b.error, 2)
    (5.0, 0.2)
    """
    certain = bounds = _bounds([*hosts], messages)
    for host, assumed in enumerate(hosts.values()):
        upper, lower = bounds[0, host], -bounds[host, 0]
        if math.isinf(upper - lower):
            ahead = min(max(assumed, lower), upper)
            bounds = bounds.copy()
            bounds[0, host], bounds[host, 0] = ahead, -ahead
            bounds = _shortest(bounds)
    offsets = (bounds[0] - bounds[:, 0]) / 2
    errors = np.maximum(certain[0] - offsets, offsets + certain[:, 0])
    return {
        host: ClockOffset(ahead, error if math.isfinite(error) else None)
        for host, ahead, error in zip(hosts, offsets.tolist(), errors.tolist(), strict=True)
    }


def _bounds(hosts: list[str], messages: Iterable[CrossHostMessage]) -> NDArray[np.float64]:
    """Return upper bounds on a host's clock (column) minus another host's clock (row) [s]."""
    upper = np.full((len(hosts), len(hosts)), math.inf)
    for c in messages:
        pair = hosts.index(c.src), hosts.index(c.dst)
        upper[pair] = min(upper[pair], c.received - c.sent - MIN_DURATION)
    for slack in _SLACKS:
        widened = upper + slack
        np.fill_diagonal(widened, 0.0)
        bounds = _shortest(widened)
        if not bounds.diagonal().any():
            return bounds
    raise ClocksDisagree(
        "the clocks of the hosts cannot be aligned: for any offsets, some messages are "
        f"received more than {_SLACKS[-1]:g} s before they are sent."
    )


def _shortest(bounds: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the tightest bounds over all paths; a negative diagonal is a contradiction."""
    for host in range(len(bounds)):
        bounds = np.minimum(bounds, bounds[:, [host]] + bounds[[host]])
    return bounds


# -- the messages of a trace ---------------------------------------------------------------------

#: ``_FROM_ROOT`` contains the collectives in which all other ranks wait for the root, ``_TO_ROOT``
#: those in which the root waits for all other ranks.
_FROM_ROOT, _TO_ROOT = {Op.BROADCAST, Op.SCATTER}, {Op.REDUCE, Op.GATHER}
#: Collectives that a rank may complete before other ranks start, if it needs no data from them.
_LOOSE = {Op.ALL_TO_ALL, Op.NEW_GROUP}
#: The name of the local host and of every other host whose clock has no known error.
_HERE = ""


def enforce_causality(trace: Log) -> Log:
    """Return the trace with times shifted so that no message arrives before it was sent.

    No time is shifted by more than its host's error, ``info.clocks[host].error``. Larger
    contradictions are ignored, because clock offsets cannot explain them.

    >>> from distkit.events import Event
    >>> from distkit.trace.info import ClockOffset, RankInfo, RunInfo
    >>> from distkit.trace.trace import Trace
    >>> send = Event(0, 0, Op.SEND, State.STARTED, 1.0, peer=1)
    >>> recv = Event(1, 0, Op.RECV, State.COMPLETED, 0.9999, peer=0)
    >>> ranks = {0: RankInfo(host="a"), 1: RankInfo(host="b")}
    >>> info = RunInfo(ranks=ranks, clocks={"b": ClockOffset(0.0, error=0.001)})
    >>> (message,) = enforce_causality(Trace([send, recv], info)).messages
    >>> message.sent < message.received
    True
    """
    errors = {host: clock.error for host, clock in trace.info.clocks.items() if clock.error}
    hosts = {
        rank: host if host in errors else _HERE
        for rank, host in hosts_if_several(trace.info).items()
    }
    close_messages = [  # a contradiction would be within the errors of both clocks
        c
        for c in cross_host_messages(trace, hosts)
        if abs(c.received - c.sent) <= errors.get(c.src, 0.0) + errors.get(c.dst, 0.0)
    ]
    if all(c.received >= c.sent for c in close_messages):
        return trace
    for host, error in errors.items():  # the known bounds of each clock, as messages
        close_messages += [
            CrossHostMessage(_HERE, 0.0, host, error),
            CrossHostMessage(host, 0.0, _HERE, error),
        ]
    try:
        offsets = align(dict.fromkeys([_HERE, *errors], 0.0), close_messages)
    except ClocksDisagree:
        return trace
    shifts = {h: min(max(offsets[h].ahead, -error), error) for h, error in errors.items()}
    events = (replace(e, time=e.time - shifts.get(hosts.get(e.rank, _HERE), 0.0)) for e in trace)
    return type(trace)(events, trace.info)


def cross_host_messages(trace: EventLog, hosts: Mapping[int, str]) -> Iterator[CrossHostMessage]:
    """Yield the messages between hosts, including the messages of collectives.

    Args:
        trace: the trace, with each host's times measured on its own clock.
        hosts: the host of each rank; messages of other ranks are ignored.
    """
    if len(set(hosts.values())) < 2:
        return
    for m in trace.messages:
        if m.sent is not None and m.received is not None and {m.src, m.dst} <= hosts.keys():
            yield CrossHostMessage(hosts[m.src], m.sent, hosts[m.dst], m.received)
    for members in trace.collectives:
        ops = {s.op for s in members}
        if len(ops) == 1 and not ops & _LOOSE:  # different operations do not match
            yield from _collective_messages([s for s in members if s.rank in hosts], hosts)


def _collective_messages(
    members: list[Span], hosts: Mapping[int, str]
) -> Iterator[CrossHostMessage]:
    """Yield a collective as messages: from a host's last start to another host's first end.

    In a collective with a root, only the root sends, or only the root waits for all others.
    """
    started, ended = dict[str, float](), dict[str, float]()
    for s in members:
        host, is_root = hosts[s.rank], s.rank == s.peer
        if s.state is not State.SCHEDULED and (is_root or s.op not in _FROM_ROOT):
            started[host] = max(s.start, started.get(host, s.start))
        if s.state is State.COMPLETED and s.end is not None and (is_root or s.op not in _TO_ROOT):
            ended[host] = min(s.end, ended.get(host, s.end))
    for src, sent in started.items():
        for dst, received in ended.items():
            if src != dst:
                yield CrossHostMessage(src, sent, dst, received)
