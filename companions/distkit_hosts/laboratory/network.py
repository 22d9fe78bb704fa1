"""The laboratory's network: a router with a port for each host. Pure: addresses and commands.

Each host has one interface, ``eth0``, with an address of its own, and reaches all others through
the router, as machines of different racks do. So the router, which belongs to the laboratory
alone, is the one place where messages are lost or delayed on request.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from ipaddress import IPv4Network

from distkit.errors import LaboratoryError

#: For tests of network devices (RFC 2544): no site routes these addresses.
NETWORK = IPv4Network("198.18.0.0/24")

#: A token bucket holds so much time's traffic [s], at least one large packet [bytes].
_BURST_SECONDS, _BURST_BYTES = 0.002, 16_384

_UNITS = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9}


def addresses(hosts: Sequence[str]) -> dict[str, str]:
    """The address of each host; the router has the first one.

    >>> addresses(["head", "alpha"])
    {'head': '198.18.0.2', 'alpha': '198.18.0.3'}
    """
    return {host: str(NETWORK[n]) for n, host in enumerate(hosts, 2)}


def connect(port: str, address: str, namespace: str) -> str:
    """``ip`` commands of the router: make a port whose other end is a host's ``eth0``."""
    return f"""link add {port} type veth peer name eth0 netns {namespace}
addr add {NETWORK[1]}/32 dev {port}
link set {port} up
route add {address} dev {port}
"""


def router() -> str:
    """``ip`` commands of the router itself: what is for a host that has gone is lost silently."""
    return f"link set lo up\nroute add blackhole {NETWORK}\n"


def join(address: str) -> str:
    """``ip`` commands of a host."""
    return f"""link set lo up
addr add {address}/32 dev eth0
link set eth0 up
route add {NETWORK[1]} dev eth0 src {address}
route add {NETWORK} via {NETWORK[1]} dev eth0 src {address}
"""


def rule(device: str | None, to: str | None, port: int | None, reject: bool) -> str:
    """The ``ip rule`` that loses what comes from a device, is for an address, and for a TCP port.

    >>> rule("port0", None, 22, reject=False)
    'iif port0 ipproto tcp dport 22 blackhole'
    """
    words = ["iif", device] if device else []
    words += ["to", to] if to else []
    words += ["ipproto", "tcp", "dport", str(port)] if port else []
    return " ".join([*words, "prohibit" if reject else "blackhole"])


def bits_per_second(rate: str) -> float:
    """The rate that ``tc`` understands by a word.

    >>> bits_per_second("100mbit")
    100000000.0

    Raises:
        LaboratoryError: it is no rate.
    """
    if match := re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?)bit", rate):
        return float(match[1]) * _UNITS[match[2]]
    raise LaboratoryError(f"{rate!r} is not a rate. Write, for example, '100mbit' or '2.5gbit'.")


def bucket(rate: str) -> str:
    """The words of ``tc`` for a queue that lets so much through."""
    burst = max(_BURST_BYTES, int(bits_per_second(rate) / 8 * _BURST_SECONDS))
    return f"tbf rate {rate} burst {burst} latency 50ms"


def hosts_file(names: dict[str, str | None]) -> str:
    """The text of ``/etc/hosts``; a name without an address cannot be resolved.

    >>> print(hosts_file({"alpha": "198.18.0.2", "beta": None}), end="")
    127.0.0.1 localhost
    ::1 localhost ip6-localhost ip6-loopback
    198.18.0.2 alpha
    """
    lines = ["127.0.0.1 localhost", "::1 localhost ip6-localhost ip6-loopback"]
    lines += [f"{address} {name}" for name, address in names.items() if address]
    return "\n".join(lines) + "\n"
