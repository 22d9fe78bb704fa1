"""Times of several hosts, put right so that no message is received before it was sent. Pure.

The offset of each host's clock was measured to within an error while the run went on, and its
times are by the reader's clock already. Where a message contradicts them, the offsets are moved
within these errors until it does not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from distkit.events import Op, Span, State
from distkit.trace.hosts import several
from distkit.trace.log import EventLog, Log
from distkit_hosts.alignment import ClocksDisagree, Correction, Crossing, align

#: All others wait for the root, or the root for all others; else everybody does for everybody.
_FROM_ROOT, _TO_ROOT = {Op.BROADCAST, Op.SCATTER}, {Op.REDUCE, Op.GATHER}
#: A member may end these before another one has begun: it gets nothing from it.
_LOOSE = {Op.ALL_TO_ALL, Op.NEW_GROUP}
#: Between more hosts than this, a collective counts as messages from and to the first and between
#: neighbours: there are too many pairs.
_ALL_PAIRS = 8
#: The reader's host, and every other one whose times are taken as they are.
_HERE = ""


def in_order(trace: Log) -> Log:
    """The trace with other times of hosts, if a message was received before it was sent.

    No time moves by more than its host's error, ``info.clocks[host].error``. A message that
    contradicts by more than that stays as it is: something else is wrong.

    >>> from distkit.events import Event
    >>> from distkit.trace.info import ClockOffset, RankInfo, RunInfo
    >>> from distkit.trace.trace import Trace
    >>> there = Event(0, 0, Op.SEND, State.STARTED, 1.0, peer=1)
    >>> here = Event(1, 0, Op.RECV, State.COMPLETED, 0.9999, peer=0)
    >>> ranks = {0: RankInfo(host="a"), 1: RankInfo(host="b")}
    >>> info = RunInfo(ranks=ranks, clocks={"b": ClockOffset(0.0, error=0.001)})
    >>> (message,) = in_order(Trace([there, here], info)).messages
    >>> message.sent < message.received
    True
    """
    errors = {host: clock.error for host, clock in trace.info.clocks.items() if clock.error}
    hosts = {rank: host if host in errors else _HERE for rank, host in several(trace.info).items()}
    near = [c for c in crossings(trace, hosts) if abs(c.received - c.sent) <= _slack(c, errors)]
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


def crossings(trace: EventLog, hosts: Mapping[int, str]) -> Iterator[Crossing]:
    """The messages between hosts, those of collectives included.

    Args:
        trace: with the times of each host by its own clock.
        hosts: the host of each rank; messages of others do not count.
    """
    if len(set(hosts.values())) < 2:
        return
    for m in trace.messages:
        if m.sent is not None and m.received is not None and {m.src, m.dst} <= hosts.keys():
            yield Crossing(hosts[m.src], m.sent, hosts[m.dst], m.received)
    for members in trace.collectives:
        ops = {s.op for s in members}
        if len(ops) == 1 and not ops & _LOOSE:  # several do not belong together
            yield from _of_collective([s for s in members if s.rank in hosts], hosts)


def _of_collective(members: list[Span], hosts: Mapping[int, str]) -> Iterator[Crossing]:
    """A collective as messages: from the last to begin on a host to the first to end on another.

    Of a rooted one only the root sends, or ends after all have begun.
    """
    begun, ended = dict[str, float](), dict[str, float]()
    for s in members:
        host, is_root = hosts[s.rank], s.rank == s.peer
        if s.state is not State.SCHEDULED and (is_root or s.op not in _FROM_ROOT):
            begun[host] = max(s.start, begun.get(host, s.start))
        if s.state is State.COMPLETED and s.end is not None and (is_root or s.op not in _TO_ROOT):
            ended[host] = min(s.end, ended.get(host, s.end))
    for n, (src, sent) in enumerate(begun.items()):
        for m, (dst, received) in enumerate(ended.items()):
            if src != dst and (len(ended) <= _ALL_PAIRS or 0 in (n, m) or abs(n - m) == 1):
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
    return type(trace)(events, trace.info)
