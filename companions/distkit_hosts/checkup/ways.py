"""Whether packets pass between machines, in both directions, and what stops them. Pure.

Connections say whether programs reach each other; datagrams, which wait for no answer, say in
which direction packets are lost.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from distkit.views.scene.units import joined
from distkit_hosts.checkup.check import Check, failure, fine, named, on, warning
from distkit_hosts.checkup.facts import HERE, Facts

#: The size of the datagram that shows whether anything passes [bytes].
SMALL = 256

#: The port that is tried is any, if not another one was asked for.
ANY = "0"

#: What a connection to a machine says whose link is cut, after a while.
_SILENT = ("timed out", "no route to host")


def ways(facts: Facts) -> Iterator[Check]:
    """What is wrong on the ways between machines."""
    found = [*_connections(facts), *_ports(facts)]
    yield from found
    if facts.ways and not found:
        yield fine("ways", "every machine connects to every other")
    yield from _frames(facts)


def _connections(facts: Facts) -> Iterator[Check]:
    filtered: dict[tuple[str, str], list[str]] = defaultdict(list)
    for a, b in facts.pairs():
        if not (facts.way(a, b) and facts.way(b, a)):
            continue
        there, back = (facts.way(*way)["tcp"].get(ANY, "") for way in ((a, b), (b, a)))
        if there and back and (check := _lost(facts, a, b, there, back)):
            yield check
        else:
            for source, to, why in ((a, b, there), (b, a, back)):
                if why:
                    filtered[to, why].append(source)
    for (to, why), sources in filtered.items():
        yield _filtered(to, sources, why)


def _lost(facts: Facts, a: str, b: str, there: str, back: str) -> Check | None:
    """Two machines that do not connect either way, and whose datagrams do not pass either."""
    to, fro = passes(facts, a, b), passes(facts, b, a)
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
    if there not in _SILENT and back not in _SILENT and "unreachable" not in there + back:
        return None  # somebody answers, to refuse
    if "unreachable" in there + back:
        who, other = (a, b) if "unreachable" in there else (b, a)
        address = facts.addresses.get(other, "ADDRESS")
        what = f"{named(who)} has no route to {named(other)} ({address})."
        remedy = f"Look at its routes: ip -4 route get {address}."
        return failure("ways.no_route", what, remedy, who, other)
    return failure(
        "ways.cut",
        f"no packets pass between {named(a)} and {named(b)}, in either direction ({there}).",
        "Look at cables, switch ports and VLANs of the two: ip link, ip -4 route.",
        a,
        b,
    )


def passes(facts: Facts, a: str, b: str) -> bool:
    """True if small datagrams from a arrived at b."""
    return SMALL in facts.way(a, b).get("arrived", ())


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


def _ports(facts: Facts) -> Iterator[Check]:
    """Ports that were asked for by number."""
    closed: dict[tuple[str, int, str], list[str]] = defaultdict(list)
    for a, b in facts.ordered():
        tcp = facts.way(a, b).get("tcp", {})
        for port in facts.ports:
            if (why := tcp.get(str(port))) and not tcp.get(ANY):
                closed[b, port, why].append(a)
    for (to, port, why), sources in closed.items():
        if why.startswith("cannot listen"):
            what = f"port {port} is taken {on(to)} ({why})."
            yield failure("ports.taken", what, f"Look who has it: ss -ltnp sport = :{port}.", to)
            continue
        yield failure(
            "ports.filtered",
            f"{named(*sources)} cannot connect to port {port} of {named(to)} ({why}), though to "
            "other ports.",
            f"Open port {port} in the firewall of {named(to)} and on the way to it.",
            to,
            *sources,
        )


# -- large frames ----------------------------------------------------------------------------------


def _frames(facts: Facts) -> Iterator[Check]:
    found = [check for a, b in facts.pairs() for check in _frame(facts, a, b)]
    yield from found
    sizes = {way["mtu"] for of in facts.ways.values() for way in of.values() if way.get("mtu")}
    if sizes and not found:
        yield fine("mtu", f"frames of {joined([str(s) for s in sorted(sizes)])} bytes pass")


def _frame(facts: Facts, a: str, b: str) -> Iterator[Check]:
    to, fro = facts.way(a, b), facts.way(b, a)
    if not (to.get("mtu") and fro.get("mtu")):
        return
    if to["mtu"] != fro["mtu"]:
        (small, low), (large, high) = sorted(
            [(a, to), (b, fro)], key=lambda host: int(host[1]["mtu"])
        )
        yield warning(
            "mtu.differs",
            f"{low['interface']} of {named(small)} takes frames of {low['mtu']} bytes, "
            f"{high['interface']} of {named(large)} of {high['mtu']}: large messages may be lost.",
            f"Give both the same: ip link set {low['interface']} mtu {high['mtu']} {on(small)}.",
            small,
            large,
        )
        return
    for source, dest in ((a, b), (b, a)):
        way = facts.way(source, dest)
        if passes(facts, source, dest) and not any(size > SMALL for size in way["arrived"]):
            stuck = "error" in way
            yield (failure if stuck else warning)(
                "mtu.blocked",
                f"frames of {way['mtu']} bytes from {named(source)} to {named(dest)} are lost on "
                f"the way, small ones arrive{', and large messages hang' if stuck else ''}.",
                f"Set the MTU of {way['interface']} to what the network carries: ip link set "
                f"{way['interface']} mtu 1400.",
                source,
                dest,
            )
