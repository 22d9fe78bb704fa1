"""Hosts of a run's ranks, traffic between them, and accuracy of their clocks. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from distkit.trace.info import RunInfo

#: Messages and bytes from each host to each host, including itself.
Traffic = dict[tuple[str, str], tuple[int, int]]


def hosts_of(info: RunInfo) -> dict[int, str]:
    """Return the host of each rank, if known."""
    return {rank: about.host for rank, about in sorted(info.ranks.items()) if about.host}


def several(info: RunInfo) -> dict[int, str]:
    """Return the host of each rank if there are several hosts; else {}.

    >>> from distkit.trace.info import RankInfo
    >>> several(RunInfo(ranks={0: RankInfo(host="alpha"), 1: RankInfo(host="alpha")}))
    {}
    """
    found = hosts_of(info)
    return found if len(set(found.values())) > 1 else {}


def traffic(hosts: Mapping[int, str], sent: Iterable[tuple[int, int, int, int]]) -> Traffic:
    """Return the messages and bytes between hosts.

    Args:
        hosts: the host of each rank; messages of other ranks are ignored.
        sent: sender, receiver, number and bytes of messages.

    >>> traffic({0: "alpha", 1: "alpha", 2: "beta"}, [(0, 1, 1, 8), (1, 2, 1, 4), (0, 2, 1, 4)])
    {('alpha', 'alpha'): (1, 8), ('alpha', 'beta'): (2, 8)}
    """
    found: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
    for src, dst, messages, nbytes in sent:
        if src in hosts and dst in hosts:
            totals = found[hosts[src], hosts[dst]]
            totals[0] += messages
            totals[1] += nbytes
    return {pair: (messages, nbytes) for pair, (messages, nbytes) in sorted(found.items())}


def between(found: Traffic) -> tuple[int, int]:
    """Return the messages and bytes sent between different hosts."""
    cross_host = [totals for (src, dst), totals in found.items() if src != dst]
    return sum(messages for messages, _ in cross_host), sum(nbytes for _, nbytes in cross_host)


def agreement(info: RunInfo) -> float | None:
    """Return the largest error of comparing times of two hosts of a run [s].

    None if the clocks were not measured, or if there is only one host.
    """
    errors = [clock.error for clock in info.clocks.values() if clock.error is not None]
    known = errors and len(errors) == len(info.clocks) and several(info)
    return sum(sorted(errors)[-2:]) if known else None
