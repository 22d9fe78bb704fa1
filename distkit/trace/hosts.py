"""On which hosts the ranks of a run are, and what that says of its messages and clocks. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from distkit.trace.info import RunInfo

#: Messages and bytes from each host to each, its own among them.
Traffic = dict[tuple[str, str], tuple[int, int]]


def hosts_of(info: RunInfo) -> dict[int, str]:
    """The host of each rank, as far as it is known."""
    return {rank: about.host for rank, about in sorted(info.ranks.items()) if about.host}


def several(info: RunInfo) -> dict[int, str]:
    """The host of each rank where they are on several; {} where there is nothing to tell apart.

    >>> from distkit.trace.info import RankInfo
    >>> several(RunInfo(ranks={0: RankInfo(host="alpha"), 1: RankInfo(host="alpha")}))
    {}
    """
    found = hosts_of(info)
    return found if len(set(found.values())) > 1 else {}


def traffic(hosts: Mapping[int, str], sent: Iterable[tuple[int, int, int, int]]) -> Traffic:
    """What hosts have sent each other.

    Args:
        hosts: the host of each rank; messages of others do not count.
        sent: sender, receiver, number and bytes of messages.

    >>> traffic({0: "alpha", 1: "alpha", 2: "beta"}, [(0, 1, 1, 8), (1, 2, 1, 4), (0, 2, 1, 4)])
    {('alpha', 'alpha'): (1, 8), ('alpha', 'beta'): (2, 8)}
    """
    found: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
    for src, dst, messages, nbytes in sent:
        if src in hosts and dst in hosts:
            both = found[hosts[src], hosts[dst]]
            both[0] += messages
            both[1] += nbytes
    return {pair: (messages, nbytes) for pair, (messages, nbytes) in sorted(found.items())}


def between(found: Traffic) -> tuple[int, int]:
    """Messages and bytes that went from one host to another one."""
    far = [both for (src, dst), both in found.items() if src != dst]
    return sum(messages for messages, _ in far), sum(nbytes for _, nbytes in far)


def agreement(info: RunInfo) -> float | None:
    """By how much times of two hosts of a run may at most be wrong, if compared [s].

    None where nothing was measured, or one clock is all there is.
    """
    errors = [clock.error for clock in info.clocks.values() if clock.error is not None]
    known = errors and len(errors) == len(info.clocks) and several(info)
    return sum(sorted(errors)[-2:]) if known else None
