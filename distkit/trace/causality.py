"""Times of several hosts, put right so that no message is received before it was sent. Pure.

The offset of each host's clock was measured to within an error while the run went on, and its
times are by the reader's clock already. Where a message contradicts them, the offsets are moved
within these errors until it does not.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from distkit.events import Op, Span, State
from distkit.trace.clocks import ClocksDisagree, Correction, Crossing, align
from distkit.trace.hosts import several
from distkit.trace.log import Log

#: Nobody ends these before everybody has begun.
_JOINT = frozenset({Op.ALL_REDUCE, Op.ALL_GATHER, Op.ALL_TO_ALL, Op.REDUCE_SCATTER, Op.BARRIER})
#: The reader's host, and every other one whose times are taken as they are.
_HERE = ""


def in_order(trace: Log) -> Log:
    """The trace with other times of hosts, if a message was received before it was sent.

    No time moves by more than its host's error, ``meta["clocks"][host]["error"]``. A message that
    contradicts by more than that stays as it is: something else is wrong.

    >>> from distkit.events import Event
    >>> from distkit.trace.trace import Trace
    >>> there = Event(0, 0, Op.SEND, State.STARTED, 1.0, peer=1)
    >>> here = Event(1, 0, Op.RECV, State.COMPLETED, 0.9999, peer=0)
    >>> meta = {"ranks": {0: {"host": "a"}, 1: {"host": "b"}}, "clocks": {"b": {"error": 0.001}}}
    >>> (message,) = in_order(Trace([there, here], meta)).messages
    >>> message.sent < message.received
    True
    """
    clocks = trace.meta.get("clocks", {})
    errors = {host: float(clock.get("error", 0.0)) for host, clock in clocks.items()}
    errors = {host: error for host, error in errors.items() if error}
    hosts = {
        rank: host if errors.get(host) else _HERE for rank, host in several(trace.meta).items()
    }
    near = [c for c in _crossings(trace, hosts) if abs(c.received - c.sent) <= _slack(c, errors)]
    if all(c.received >= c.sent for c in near):
        return trace
    try:
        corrections = align(dict.fromkeys([_HERE, *errors], 0.0), [*near, *_known(near, errors)])
    except ClocksDisagree:
        return trace
    return _moved(trace, hosts, corrections, errors)


def _slack(crossing: Crossing, errors: Mapping[str, float]) -> float:
    """By how much a message may seem too quick, and in truth was not [s]."""
    return errors.get(crossing.src, 0.0) + errors.get(crossing.dst, 0.0)


def _known(near: list[Crossing], errors: Mapping[str, float]) -> Iterator[Crossing]:
    """What is known of each clock at the ends of these messages, said by messages."""
    for crossing in near:
        for host, at in (crossing.src, crossing.sent), (crossing.dst, crossing.received):
            if host in errors:
                yield Crossing(_HERE, at - errors[host], host, at)
                yield Crossing(host, at, _HERE, at + errors[host])


def _crossings(trace: Log, hosts: Mapping[int, str]) -> Iterator[Crossing]:
    """Messages between hosts; and for each collective, from its last begin on a host to an end."""
    if len(set(hosts.values())) < 2:
        return
    for m in trace.messages:
        if m.sent is not None and m.received is not None and m.src in hosts and m.dst in hosts:
            yield Crossing(hosts[m.src], m.sent, hosts[m.dst], m.received)
    for members in trace.collectives:
        if {s.op for s in members} <= _JOINT:
            yield from _joint(members, hosts)


def _joint(members: list[Span], hosts: Mapping[int, str]) -> Iterator[Crossing]:
    begun: dict[str, float] = defaultdict(lambda: -math.inf)
    ended: dict[str, float] = defaultdict(lambda: math.inf)
    for s in members:
        host = hosts.get(s.rank, _HERE)
        if s.state is not State.SCHEDULED:
            begun[host] = max(begun[host], s.start)
        if s.state is State.COMPLETED and s.end is not None:
            ended[host] = min(ended[host], s.end)
    for src, sent in begun.items():
        for dst, received in ended.items():
            if src != dst:
                yield Crossing(src, sent, dst, received)


def _moved(
    trace: Log,
    hosts: Mapping[int, str],
    corrections: Mapping[str, Correction],
    errors: Mapping[str, float],
) -> Log:
    """The trace by the corrected clocks; no time moves further than its error."""
    times = np.array([e.time for e in trace])
    ranks = np.array([hosts.get(e.rank, _HERE) for e in trace])
    for host, error in errors.items():
        mine = ranks == host
        moved = corrections[host](times[mine]) - times[mine]
        times[mine] += np.clip(moved, -error, error)
    events = (replace(e, time=t) for e, t in zip(trace, times.tolist(), strict=True))
    return type(trace)(events, trace.meta)
