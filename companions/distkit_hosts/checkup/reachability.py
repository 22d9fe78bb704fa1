"""Whether packets pass between machines, in both directions, and what stops them. Pure.

Connections say whether programs reach each other; datagrams, which need no answer, say in which
direction packets are lost.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from distkit_hosts.checkup.check import Check, failure, fine, named, on
from distkit_hosts.checkup.facts import HERE, Facts

#: What a connection to a machine says whose link is cut, after a while.
_SILENT = ("timed out", "no route to host")


def reachability(facts: Facts) -> Iterator[Check]:
    """What is wrong on the ways between machines."""
    filtered: dict[tuple[str, str], list[str]] = defaultdict(list)
    found = list[Check]()
    for a, b in facts.pairs():
        there, back = (facts.way(*way).get("tcp", "") for way in ((a, b), (b, a)))
        if there and back and (lost := _lost(facts, a, b, there, back)):
            found.append(lost)
        else:
            for source, to, why in ((a, b, there), (b, a, back)):
                if why:
                    filtered[to, why].append(source)
    found += [_filtered(to, sources, why) for (to, why), sources in filtered.items()]
    yield from found
    if facts.ways and not found:
        yield fine("ways", "every machine connects to every other")


def _lost(facts: Facts, a: str, b: str, there: str, back: str) -> Check | None:
    """Two machines that do not connect either way, and whose datagrams do not pass either."""
    to, fro = (facts.way(*way).get("arrived") for way in ((a, b), (b, a)))
    if to and fro:
        return None  # a firewall stops connections only
    if to or fro:
        source, dest = (b, a) if to else (a, b)
        return failure(
            "ways.one_way",
            f"packets from {named(source)} to {named(dest)} are lost, those from {named(dest)} to "
            f"{named(source)} arrive.",
            f"Look at the firewall of {named(dest)} (iptables -L INPUT), at what that of "
            f"{named(source)} lets out, and at the route: ip -4 route get "
            f"{facts.addresses.get(dest, 'ADDRESS')} {on(source)}.",
            source,
            dest,
        )
    if "unreachable" in there + back:
        who, other = (a, b) if "unreachable" in there else (b, a)
        address = facts.addresses.get(other, "ADDRESS")
        what = f"{named(who)} has no route to {named(other)} ({address})."
        remedy = f"Look at its routes: ip -4 route get {address}."
        return failure("ways.no_route", what, remedy, who, other)
    if there not in _SILENT and back not in _SILENT:
        return None  # somebody answers, to refuse
    return failure(
        "ways.cut",
        f"no packets pass between {named(a)} and {named(b)}, in either direction ({there}).",
        "Look at cables, switch ports and VLANs of the two: ip link, ip -4 route.",
        a,
        b,
    )


def _filtered(to: str, sources: list[str], why: str) -> Check:
    """A machine that lets no connections in."""
    ports = "/proc/sys/net/ipv4/ip_local_port_range"
    remedy = f"Open the ports of {ports} to these machines: iptables -L INPUT, ufw status."
    if to == HERE:
        remedy += " Or start the notebook on one of the hosts."
    return failure(
        "ways.filtered",
        f"{named(to)} lets no connections in: {named(*sources)} cannot connect to a port that a "
        f"program there listens on ({why}).",
        remedy,
        to,
        *sources,
    )
