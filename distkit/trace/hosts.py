"""On which hosts the ranks of a run are, and what that says of its messages and clocks. Pure."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

#: Messages and bytes from each host to each, its own among them.
Traffic = dict[tuple[str, str], tuple[int, int]]


def hosts_of(meta: Mapping[str, Any]) -> dict[int, str]:
    """The host of each rank, as far as a trace's ``meta`` tells."""
    about = ((int(rank), it.get("host")) for rank, it in meta.get("ranks", {}).items())
    return {rank: str(host) for rank, host in sorted(about) if host}


def several(meta: Mapping[str, Any]) -> dict[int, str]:
    """The host of each rank where they are on several; {} where there is nothing to tell apart.

    >>> several({"ranks": {"0": {"host": "alpha"}, "1": {"host": "alpha"}}})
    {}
    """
    found = hosts_of(meta)
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


def agreement(meta: Mapping[str, Any]) -> float | None:
    """By how much times of two hosts of a run may at most be wrong, if compared [s].

    None where nothing was measured, or one clock is all there is.
    """
    errors = [float(clock.get("error", math.inf)) for clock in meta.get("clocks", {}).values()]
    apart = sum(sorted(errors)[-2:])
    return apart if errors and math.isfinite(apart) and several(meta) else None
