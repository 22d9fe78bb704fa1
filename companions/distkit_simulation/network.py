"""Networks of ranks: durations of messages that start at the same time. Pure.

A network computes the durations of many transfers at once. Transfers of a round share a host's
network card, a switch's uplink or a torus's cable fairly.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from distkit.algorithms.rounds import Ints

Floats = NDArray[np.float64]

#: Maximum beta [s/byte]: larger values are bandwidths that were not inverted by mistake.
MAX_BETA = 1.0


@dataclass(frozen=True)
class Link:
    """A link between two ranks, on which m bytes take alpha + beta·m seconds.

    Args:
        alpha: latency [s].
        beta: seconds per byte, the inverse of the bandwidth.
        gamma: seconds per byte to add received values.
        switches: the transport's other protocols, as ``(nbytes, alpha, beta)``, for messages
            larger than ``nbytes``.

    Raises:
        ValueError: a number is negative or not finite, or a beta is a bandwidth.

    Source:
        Hockney, "The communication challenge for MPP", 1994.

    Example:
        >>> Link(alpha=1e-6, beta=1e-9).seconds(3000)
        4e-06
        >>> eager = Link(1e-6, 1e-9, switches=((4096, 5e-6, 1e-10),))
        >>> eager.seconds(4096) > eager.seconds(8192)
        False
    """

    alpha: float
    beta: float
    gamma: float = 0.0
    switches: tuple[tuple[float, float, float], ...] = ()

    def __post_init__(self) -> None:
        numbers = {"alpha": self.alpha, "beta": self.beta, "gamma": self.gamma}
        for i, (_, alpha, beta) in enumerate(self.switches):
            numbers |= {f"alpha of switch {i}": alpha, f"beta of switch {i}": beta}
        for name, value in numbers.items():
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"a link's {name} is {value}: give seconds ≥ 0")
            if name.startswith("beta") and value > MAX_BETA:
                raise ValueError(
                    f"a link's {name} is {value:g}: beta is seconds per byte: give 1/{value:g}, "
                    "or dk.simulation.Link.of(latency, bandwidth)"
                )
        starts = [s[0] for s in self.switches]
        if starts != sorted(set(starts)):
            raise ValueError(f"switches at {starts} bytes: give them in ascending order")

    @classmethod
    def of(cls, latency: float, bandwidth: float, gamma: float = 0.0) -> Link:
        """Create a link of ``latency`` seconds and ``bandwidth`` bytes per second.

        >>> Link.of(1e-6, 12.5e9)                  # 100 Gb/s
        Link(alpha=1e-06, beta=8e-11, gamma=0.0, switches=())
        """
        if not bandwidth > 0:
            raise ValueError(f"a bandwidth of {bandwidth} bytes/s: give a positive one")
        return cls(latency, 1 / bandwidth, gamma)

    def seconds(self, nbytes: ArrayLike) -> Any:
        """Return the seconds of a message of ``nbytes``; an array for an array."""
        size = np.asarray(nbytes, float)
        if not self.switches:
            return plain(self.alpha + self.beta * size)
        starts, alphas, betas = map(np.array, zip(*self.switches, strict=True))
        at = np.searchsorted(starts, size, side="left")
        return plain(np.r_[self.alpha, alphas][at] + np.r_[self.beta, betas][at] * size)


def check_link(given: object) -> None:
    """Check that an object is a link.

    Raises:
        TypeError: it is not a link.
    """
    if not isinstance(given, Link):
        remedy = (
            "give its .link"
            if isinstance(given, Network)
            else "give dk.simulation.Link(alpha, beta)"
        )
        raise TypeError(
            f"a formula takes a dk.simulation.Link, not {type(given).__name__}: {remedy}"
        )


def check_network(given: object, n: int) -> None:
    """Check that an object is a network of ``n`` ranks.

    Raises:
        TypeError: it is not a network.
        ValueError: it has another number of ranks.
    """
    if not isinstance(given, Network):
        link = "the link" if isinstance(given, Link) else "a dk.simulation.Link"
        raise TypeError(
            f"ranks are simulated on a dk.simulation.Network, not {type(given).__name__}: "
            f"give dk.simulation.Network({link}) for equal links between all ranks"
        )
    if n < 1:
        raise ValueError(f"{n} ranks: at least 1 is needed")
    if given.ranks not in (None, n):
        raise ValueError(
            f"{given.shown} are {given.ranks} ranks, not {n}: give a network of {n}, "
            f"or simulate {given.ranks}"
        )


def plain(numbers: ArrayLike) -> Any:
    """Return an array, or the number in an array without dimensions."""
    array = np.asarray(numbers)
    return array if array.ndim else array.item()


class Network:
    """Ranks connected by equal links through a perfect switch.

    A rank sends one message and receives one at a time. Other networks are :meth:`hosts`,
    :meth:`tree` and :meth:`torus`; :func:`distkit_simulation.calibrate` measures one.

    Args:
        link: the link between any two ranks.

    Example:
        >>> Network(Link(1e-6, 1e-9)).seconds([0, 1], [1, 0], [1000, 2000])
        array([2.e-06, 3.e-06])
    """

    def __init__(self, link: Link, ranks: int | None = None, shown: str = "its places") -> None:
        self.link = link
        self.ranks, self.shown = ranks, shown  # None: any number; description of the ranks

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.link})"

    @classmethod
    def flat(cls, link: Link) -> Network:
        """Create a network with equal links between all ranks."""
        return Network(link)

    @staticmethod
    def hosts(hosts: int, devices: int, inside: Link, between: Link) -> Grouped:
        """Create hosts of several devices each, with fast links inside and slower ones between.

        Args:
            hosts: number of hosts.
            devices: ranks on each host; ranks are numbered host by host.
            inside: the link between devices of a host.
            between: the link of a host's network card, in each direction.
        """
        _positive(hosts=hosts, devices=devices)
        shown = f"{hosts} hosts of {devices} devices"
        return Grouped(hosts, devices, inside, between, shown=shown)

    @staticmethod
    def tree(racks: int, hosts: int, link: Link, *, oversubscription: float = 1.0) -> Grouped:
        """Create racks with oversubscribed uplinks.

        Args:
            racks: number of racks.
            hosts: ranks in each rack; rank = rack · hosts + host.
            link: the link of each rank to its rack's switch.
            oversubscription: total bandwidth of a rack's hosts over that of its uplink.
        """
        _positive(racks=racks, hosts=hosts, oversubscription=oversubscription)
        share, shown = oversubscription / hosts, f"{racks} racks of {hosts} hosts"
        return Grouped(racks, hosts, link, link, share=share, shown=shown)

    @staticmethod
    def torus(shape: Sequence[int], link: Link) -> Torus:
        """Create a grid whose rows are rings: messages go dimension by dimension, the shorter way.

        Args:
            shape: ranks along each dimension; the last one varies fastest.
            link: the link of a hop, in each direction; ``alpha`` counts for every hop.
        """
        return Torus(tuple(shape), link)

    def seconds(self, src: ArrayLike, dst: ArrayLike, nbytes: ArrayLike) -> Floats:
        """Return the seconds of transfers that start together.

        Args:
            src: sending ranks, shape (m,).
            dst: receiving ranks, shape (m,).
            nbytes: bytes of each, shape (m,).
        """
        took: Floats = self.link.seconds(nbytes)
        return took

    def calling(self, nbytes: int) -> float:
        """Return the seconds of a collective besides its messages and sums."""
        return 0.0

    def adding(self, rank: ArrayLike, nbytes: ArrayLike) -> Floats:
        """Return the seconds that ranks take to add received bytes, shape (m,)."""
        return self.link.gamma * np.asarray(nbytes, float)


class Grouped(Network):
    """Groups of ranks that share a link to the others: see :meth:`Network.hosts`, ``tree``.

    Args:
        groups: number of groups.
        each: ranks in each group.
        inside: the link within a group.
        between: the link to other groups.
        share: the seconds that a byte takes on the shared link, relative to ``between``.
        shown: description of the ranks, for messages.
    """

    def __init__(
        self, groups: int, each: int, inside: Link, between: Link, *, share: float = 1.0, shown: str
    ) -> None:
        super().__init__(between, groups * each, shown)
        self.each, self.inside, self.share = each, inside, share

    def seconds(self, src: ArrayLike, dst: ArrayLike, nbytes: ArrayLike) -> Floats:
        """See :meth:`Network.seconds`."""
        src, dst, size = _ends(src, dst, nbytes)
        took: Floats = self.inside.seconds(size)
        out, into = src // self.each, dst // self.each
        remote = np.flatnonzero(out != into)
        m = size[remote]
        queued = np.maximum(shared(out[remote], m), shared(into[remote], m))
        took[remote] = _loaded(self.link, m, np.maximum(m, queued * self.share))
        return took


class Torus(Network):
    """See :meth:`Network.torus`."""

    def __init__(self, shape: tuple[int, ...], link: Link) -> None:
        _positive(**{f"dimension {d}": size for d, size in enumerate(shape)})
        shown = f"the places of a torus of {' × '.join(map(str, shape))}"
        super().__init__(link, math.prod(shape), shown)
        self.shape = shape

    def seconds(self, src: ArrayLike, dst: ArrayLike, nbytes: ArrayLike) -> Floats:
        """See :meth:`Network.seconds`."""
        src, dst, size = _ends(src, dst, nbytes)
        queued, hops = size.copy(), np.zeros(len(size))
        cables = list(self._route(src, dst))
        cable = np.concatenate([cable for _, cable in cables]) if cables else np.zeros(0, int)
        moved = np.concatenate([moved for moved, _ in cables]) if cables else np.zeros(0, int)
        np.maximum.at(queued, moved, shared(cable, size[moved]))
        np.add.at(hops, moved, 1)
        return _loaded(self.link, size, queued) + (np.maximum(hops, 1) - 1) * self.link.alpha

    def _route(self, src: Ints, dst: Ints) -> Iterator[tuple[Ints, Ints]]:
        """Yield the transfers of each hop, and the indices of their cables."""
        at, to = (np.array(np.unravel_index(r, self.shape)) for r in (src, dst))
        for d, size in enumerate(self.shape):
            distance = (to[d] - at[d]) % size
            step = np.where(distance * 2 > size, -1, 1)
            remaining = np.minimum(distance, size - distance)
            while (moving := np.flatnonzero(remaining)).size:
                position = np.ravel_multi_index(tuple(at[:, moving]), self.shape)
                yield moving, (position * len(self.shape) + d) * 2 + (step[moving] < 0)
                at[d, moving] = (at[d, moving] + step[moving]) % size
                remaining[moving] -= 1


def shared(resource: Ints, nbytes: Floats) -> Floats:
    """Return the bytes that a resource has carried by the end of transfers that start at once.

    Under processor sharing of transfers of sizes m_j, the i-th ends after Σ_j min(m_i, m_j) bytes.

    >>> shared(np.array([7, 7, 3]), np.array([10.0, 4.0, 5.0]))
    array([14.,  8.,  5.])
    """
    order = np.lexsort((nbytes, resource))
    _, first, index, counts = np.unique(
        resource[order], return_index=True, return_inverse=True, return_counts=True
    )
    m = nbytes[order]
    before = np.cumsum(m) - m
    smaller = before - before[first][index]  # bytes of smaller transfers on the same resource
    larger = counts[index] - (np.arange(len(m)) - first[index])  # including itself
    done = np.empty(len(m))
    done[order] = smaller + larger * m
    return done


def _loaded(link: Link, nbytes: Floats, queued: Floats) -> Floats:
    """Return the seconds of a message that ends after ``queued`` bytes on its link."""
    alone: Floats = link.seconds(nbytes)
    alpha: Floats = link.seconds(np.zeros(1))
    beta = np.where(nbytes > 0, (alone - alpha) / np.maximum(nbytes, 1e-300), 0.0)
    return alone + beta * (queued - nbytes)


def _ends(src: ArrayLike, dst: ArrayLike, nbytes: ArrayLike) -> tuple[Ints, Ints, Floats]:
    a, b = np.asarray(src, int), np.asarray(dst, int)
    return a, b, np.broadcast_to(np.asarray(nbytes, float), a.shape)


def _positive(**numbers: float) -> None:
    for name, value in numbers.items():
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"a network with {name} = {value}: give a positive number")
