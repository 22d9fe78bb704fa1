"""Network models, which determine how long concurrent transfers between ranks take.

Transfers in the same round share the bandwidth of a host's NIC equally. No side effects.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from distkit.algorithms.rounds import Ints

Floats = NDArray[np.float64]

#: Maximum beta [s/byte]; larger values are probably bandwidths.
MAX_BETA = 1.0


@dataclass(frozen=True)
class Link:
    """A link between two ranks, on which m bytes take alpha + beta·m seconds.

    Args:
        alpha: the latency [s].
        beta: the time per byte [s/byte], the inverse of the bandwidth.
        gamma: the time per byte to add received values [s/byte].
        switches: the sizes at which the transport switches to a different protocol, such as
            rendezvous, as ``(nbytes, alpha, beta)`` for messages larger than ``nbytes``.

    Raises:
        ValueError: a number is negative or not finite, or a beta is so large (more than 1 s/byte)
            that it is probably a bandwidth.

    Source:
        Hockney, "The communication challenge for MPP", 1994.

    Example:
        >>> Link(alpha=1e-6, beta=1e-9).seconds(3000)
        4e-06
        >>> link = Link(1e-6, 1e-9, switches=((4096, 5e-6, 1e-10),))
        >>> [link.seconds(n) for n in (4096, 8192)]
        [5.096e-06, 5.8192e-06]
    """

    alpha: float
    beta: float
    gamma: float = 0.0
    switches: tuple[tuple[float, float, float], ...] = ()

    def __post_init__(self) -> None:
        numbers = {
            "alpha [s]": self.alpha,
            "beta [s/byte]": self.beta,
            "gamma [s/byte]": self.gamma,
        }
        for i, (_, alpha, beta) in enumerate(self.switches):
            numbers |= {f"switches[{i}] alpha [s]": alpha, f"switches[{i}] beta [s/byte]": beta}
        for name, value in numbers.items():
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"Link: {name} must be finite and at least 0; got {value}")
            if "beta" in name and value > MAX_BETA:
                raise ValueError(
                    f"Link: {name} is probably a bandwidth; got {value:g}. Use 1/{value:g}, or "
                    "dk.simulation.Link.of(latency, bandwidth)"
                )
        starts = [s[0] for s in self.switches]
        if starts != sorted(set(starts)):
            raise ValueError(f"switches must be in ascending order; got {starts} bytes")

    @classmethod
    def of(cls, latency: float, bandwidth: float, gamma: float = 0.0) -> Link:
        """Create a link with ``latency`` [s] and ``bandwidth`` [bytes/s].

        >>> Link.of(1e-6, 12.5e9)                  # 100 Gb/s
        Link(alpha=1e-06, beta=8e-11, gamma=0.0, switches=())
        """
        if not bandwidth > 0:
            raise ValueError(f"a bandwidth must be positive; got {bandwidth} bytes/s")
        return cls(latency, 1 / bandwidth, gamma)

    def seconds(self, nbytes: ArrayLike) -> Any:
        """Return how long a message of ``nbytes`` takes [s]; an array yields an array."""
        size = np.asarray(nbytes, float)
        if not self.switches:
            return plain(self.alpha + self.beta * size)
        starts, alphas, betas = map(np.array, zip(*self.switches, strict=True))
        index = np.searchsorted(starts, size, side="left")
        return plain(np.r_[self.alpha, alphas][index] + np.r_[self.beta, betas][index] * size)


def check_link(link: object) -> None:
    """Raise TypeError if an object is not a link."""
    if not isinstance(link, Link):
        remedy = (
            "pass network.link"
            if isinstance(link, Network)
            else "pass dk.simulation.Link(alpha, beta)"
        )
        raise TypeError(
            f"a formula needs a dk.simulation.Link, not {type(link).__name__}: {remedy}"
        )


def check_network(network: object, n: int) -> None:
    """Check that an object is a network of ``n`` ranks.

    Raises:
        TypeError: the object is not a network.
        ValueError: the network has a different number of ranks.
    """
    if not isinstance(network, Network):
        link = "the link" if isinstance(network, Link) else "a dk.simulation.Link"
        raise TypeError(
            f"a simulation needs a dk.simulation.Network, not {type(network).__name__}: "
            f"use dk.simulation.Network({link}) for equal links between all ranks"
        )
    if n < 1:
        raise ValueError(f"the number of ranks must be at least 1; got {n}")
    if network.ranks not in (None, n):
        raise ValueError(
            f"the network ({network.description}) has {network.ranks} ranks, not {n}: use a "
            f"network of {n} ranks, or simulate {network.ranks} ranks"
        )


def plain(numbers: ArrayLike) -> Any:
    """Return an array, or the number in a zero-dimensional array."""
    array = np.asarray(numbers)
    return array if array.ndim else array.item()


class Network:
    """Ranks connected by equal links through a non-blocking switch.

    A rank sends at most one message and receives at most one at a time. :meth:`hosts` creates a
    network of hosts with several devices each. :func:`distkit_simulation.calibrate` measures a
    network.

    Args:
        link: the link between any two ranks.

    Example:
        >>> Network(Link(1e-6, 1e-9)).seconds([0, 1], [1, 0], [1000, 2000])
        array([2.e-06, 3.e-06])
    """

    def __init__(
        self, link: Link, ranks: int | None = None, description: str = "equal links"
    ) -> None:
        self.link = link
        self.ranks, self.description = ranks, description  # any number of ranks if None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.link})"

    @staticmethod
    def hosts(hosts: int, devices: int, inside: Link, between: Link) -> Hosts:
        """Create a network of hosts with several devices each.

        Args:
            hosts: the number of hosts.
            devices: the number of ranks on each host; ranks are numbered host by host.
            inside: the link between devices on a host.
            between: the link of a host's NIC, in each direction.
        """
        return Hosts(hosts, devices, inside, between)

    def seconds(self, src: ArrayLike, dst: ArrayLike, nbytes: ArrayLike) -> Floats:
        """Return the time of transfers that start together [s].

        Args:
            src: the sending ranks, shape (m,).
            dst: the receiving ranks, shape (m,).
            nbytes: the bytes of each transfer, shape (m,).
        """
        seconds: Floats = self.link.seconds(nbytes)
        return seconds

    def overhead_seconds(self, nbytes: int) -> float:
        """Return the time that a collective takes in addition to its messages and sums [s]."""
        return 0.0

    def reduce_seconds(self, rank: ArrayLike, nbytes: ArrayLike) -> Floats:
        """Return the time that ranks need to add received bytes [s], shape (m,)."""
        return self.link.gamma * np.asarray(nbytes, float)


class Hosts(Network):
    """Hosts whose ranks share a NIC; see :meth:`Network.hosts`."""

    def __init__(self, hosts: int, devices: int, inside: Link, between: Link) -> None:
        if hosts < 1 or devices < 1:
            raise ValueError(
                f"a network needs at least one host, and at least one device on each host; got "
                f"hosts={hosts} and devices={devices}"
            )
        super().__init__(between, hosts * devices, f"{hosts} hosts of {devices} devices")
        self.devices, self.inside = devices, inside

    def seconds(self, src: ArrayLike, dst: ArrayLike, nbytes: ArrayLike) -> Floats:
        """See :meth:`Network.seconds`."""
        src_host, dst_host = (np.asarray(ranks, int) // self.devices for ranks in (src, dst))
        size = np.broadcast_to(np.asarray(nbytes, float), src_host.shape)
        seconds: Floats = self.inside.seconds(size)
        remote = np.flatnonzero(src_host != dst_host)
        m = size[remote]
        total = np.maximum(carried_bytes(src_host[remote], m), carried_bytes(dst_host[remote], m))
        seconds[remote] = _loaded_seconds(self.link, m, np.maximum(m, total))
        return seconds


def carried_bytes(resource: Ints, nbytes: Floats) -> Floats:
    """Return the number of bytes that a resource has carried when each transfer ends.

    If transfers of sizes m_j start together and share a resource equally, the i-th ends after
    Σ_j min(m_i, m_j) bytes.

    >>> carried_bytes(np.array([7, 7, 3]), np.array([10.0, 4.0, 5.0]))
    array([14.,  8.,  5.])
    """
    order = np.lexsort((nbytes, resource))
    _, first, index, counts = np.unique(
        resource[order], return_index=True, return_inverse=True, return_counts=True
    )
    m = nbytes[order]
    previous_bytes = np.cumsum(m) - m
    # bytes of smaller transfers on the same resource
    smaller = previous_bytes - previous_bytes[first][index]
    larger = counts[index] - (np.arange(len(m)) - first[index])  # including this one
    totals = np.empty(len(m))
    totals[order] = smaller + larger * m
    return totals


def _loaded_seconds(link: Link, nbytes: Floats, total: Floats) -> Floats:
    """Return the time of a message that ends after ``total`` bytes on its link [s]."""
    unloaded: Floats = link.seconds(nbytes)
    alpha: Floats = link.seconds(np.zeros(1))
    beta = np.where(nbytes > 0, (unloaded - alpha) / np.maximum(nbytes, 1e-300), 0.0)
    return unloaded + beta * (total - nbytes)
