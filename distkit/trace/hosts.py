"""Reports a run's hosts, the traffic between them, and the accuracy of their clocks.

No side effects.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from distkit.trace.info import RunInfo

#: Number of messages and bytes for each pair of source and destination host.
Traffic = dict[tuple[str, str], tuple[int, int]]


def hosts_of(info: RunInfo) -> dict[int, str]:
    """Return the host of each rank, if known."""
    return {rank: process.host for rank, process in sorted(info.ranks.items()) if process.host}


def several(info: RunInfo) -> dict[int, str]:
    """Return the host of each rank if there are several hosts; else {}.

    >>> from distkit.trace.info import RankInfo
    >>> several(RunInfo(ranks={0: RankInfo(host="alpha"), 1: RankInfo(host="alpha")}))
    {}
    """
    known = hosts_of(info)
    return known if len(set(known.values())) > 1 else {}


def traffic(hosts: Mapping[int, str], sent: Iterable[tuple[int, int, int, int]]) -> Traffic:
    """Return the messages and bytes between hosts.

    Args:
        hosts: the host of each rank; messages of other ranks are ignored.
        sent: sender, receiver, number and bytes of messages.

    >>> traffic({0: "alpha", 1: "alpha", 2: "beta"}, [(0, 1, 1, 8), (1, 2, 1, 4), (0, 2, 1, 4)])
    {('alpha', 'alpha'): (1, 8), ('alpha', 'beta'): (2, 8)}
    """
    by_pair: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
    for src, dst, messages, nbytes in sent:
        if src in hosts and dst in hosts:
            totals = by_pair[hosts[src], hosts[dst]]
            totals[0] += messages
            totals[1] += nbytes
    return {pair: (messages, nbytes) for pair, (messages, nbytes) in sorted(by_pair.items())}


def between(by_pair: Traffic) -> tuple[int, int]:
    """Return the messages and bytes sent between different hosts."""
    cross_host = [totals for (src, dst), totals in by_pair.items() if src != dst]
    return sum(messages for messages, _ in cross_host), sum(nbytes for _, nbytes in cross_host)


def agreement(info: RunInfo) -> float | None:
    """Return the maximum error when times of two hosts of a run are compared [s].

    The result is None if the clocks were not measured, or if there is only one host.
    """
    errors = [clock.error for clock in info.clocks.values() if clock.error is not None]
    known = errors and len(errors) == len(info.clocks) and several(info)
    return sum(sorted(errors)[-2:]) if known else None
