"""Building blocks for schedules and cost formulas, and evaluation of schedules. No side effects."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int_]
Bools = NDArray[np.bool_]
#: The ranks on each host.
Hosts = Sequence[Sequence[int]]
Numbers = Any  # a number or an array


@dataclass(frozen=True, slots=True)
class Round:
    """One round of an algorithm, a set of simultaneous transfers of one message each.

    Transfer ``i`` carries the chunks ``chunk[i]`` … ``chunk[i] + count[i] - 1`` from rank
    ``src[i]`` to rank ``dst[i]``, which combines them with its own chunks (``reduce``) or replaces
    its own chunks. Every message carries the sender's values from the start of the round.

    Args:
        src: sending rank of each transfer.
        dst: receiving rank of each transfer.
        chunk: the first chunk of each transfer.
        reduce: whether the receiver combines chunks; one value for all transfers, or one for each.
        count: number of consecutive chunks; one value for all transfers, or one for each.
    """

    src: Ints
    dst: Ints
    chunk: Ints
    reduce: bool | Bools
    count: int | Ints = 1

    def per_chunk(self) -> tuple[Ints, Ints, Ints, Bools]:
        """Return the transfers with one row per chunk: ``src, dst, chunk, reduce``.

        >>> Round(np.array([0]), np.array([1]), np.array([4]), True, 2).per_chunk()[2]
        array([4, 5])
        """
        count = np.broadcast_to(self.count, self.src.shape)
        row = np.repeat(np.arange(len(self.src)), count)
        nth = np.arange(len(row)) - (np.cumsum(count) - count)[row]
        reduce = np.broadcast_to(self.reduce, self.src.shape)[row]
        return self.src[row], self.dst[row], self.chunk[row] + nth, reduce


#: The rounds of an algorithm.
Schedule = Iterator[Round]


def ring_rounds(n: int, first: int, *, reduce: bool) -> Schedule:
    """Yield the rounds of a ring pass: rank r sends chunk r + ``first``, then each chunk received.

    >>> [t.chunk.tolist() for t in ring_rounds(3, 0, reduce=True)]
    [[0, 1, 2], [2, 0, 1]]
    """
    r = np.arange(n)
    for s in range(n - 1):
        yield Round(src=r, dst=(r + 1) % n, chunk=(r + first - s) % n, reduce=reduce)


def with_folded_ranks(inner: Schedule, folded: Ints, partners: Ints, chunks: int) -> Schedule:
    """Yield the rounds of ``inner`` between two rounds for the folded ranks.

    In the first round, the folded ranks send their tensors to their partners. In the last round,
    they receive the result. They do not take part in ``inner``.

    Args:
        inner: the rounds of the ranks that are not folded.
        folded: the folded ranks.
        partners: the partner of each folded rank, which also takes part on behalf of that rank.
        chunks: number of chunks of the tensor.
    """
    start = np.zeros_like(folded)
    if len(folded):
        yield Round(folded, partners, start, reduce=True, count=chunks)
    yield from inner
    if len(folded):
        yield Round(partners, folded, start, reduce=False, count=chunks)


def count_contributions(schedule: Iterable[Round], n: int, chunks: int | None = None) -> Ints:
    """Count each rank's contributions to each final chunk: ``counts[rank, chunk, contributor]``.

    An all-reduce is correct if every count is 1, that is, if each rank contributes exactly once.

    Args:
        schedule: rounds over ``n`` ranks.
        n: number of ranks.
        chunks: number of chunks of the tensor; by default n.

    Returns:
        Counts of shape (n, chunks, n).

    Raises:
        ValueError: A round overwrites a chunk of a rank twice, or overwrites and reduces it.

    Example:
        >>> swap = Round(np.array([0, 1]), np.array([1, 0]), np.array([0, 0]), reduce=True)
        >>> count_contributions([swap], 2, chunks=1).tolist()
        [[[1, 1]], [[1, 1]]]
    """
    chunks = n if chunks is None else chunks
    counts = np.zeros((n, chunks, n), dtype=int)
    counts[np.arange(n), :, np.arange(n)] = 1
    for number, t in enumerate(schedule):
        src, dst, chunk, reduce = t.per_chunk()
        sent_counts = counts[src, chunk]
        target = dst * chunks + chunk
        if np.isin(target[~reduce], target[reduce]).any() or len(set(target[~reduce])) < sum(
            ~reduce
        ):
            raise ValueError(
                f"round {number} overwrites a chunk twice, or overwrites and reduces it"
            )
        counts[dst[~reduce], chunk[~reduce]] = 0
        np.add.at(counts, (dst, chunk), sent_counts)
    return counts


def chunk_sizes(length: int, chunks: int) -> Ints:
    """Return the number of elements of each chunk that ``torch.tensor_split`` returns.

    >>> chunk_sizes(5, 3)
    array([2, 2, 1])
    """
    return length // chunks + (np.arange(chunks) < length % chunks)


def offsets(length: int, chunks: int) -> list[int]:
    """Return the offset of each chunk, and the end of the last one.

    >>> offsets(5, 3)
    [0, 2, 4, 5]
    """
    return [0, *np.cumsum(chunk_sizes(length, chunks)).tolist()]


def traffic(
    schedule: Iterable[Round], n: int, nbytes: int, chunks: int | None = None, itemsize: int = 1
) -> tuple[Ints, Ints]:
    """Return the number of messages and bytes that each rank sends.

    Args:
        schedule: rounds over ``n`` ranks.
        n: number of ranks.
        nbytes: total size of all chunks [bytes].
        chunks: number of chunks of the tensor; by default n.
        itemsize: size of an element [bytes]; elements are never split.

    Returns:
        Messages and bytes sent, two arrays of shape (n,).

    Example:
        >>> pair = Round(np.array([0]), np.array([1]), np.array([0]), reduce=True, count=2)
        >>> traffic([pair], 2, nbytes=1000)
        (array([1, 0]), array([1000,    0]))
    """
    size = chunk_sizes(nbytes // itemsize, n if chunks is None else chunks) * itemsize
    messages, sent = np.zeros(n, dtype=int), np.zeros(n, dtype=int)
    for t in schedule:
        src, _, chunk, _ = t.per_chunk()
        np.add.at(messages, t.src, 1)
        np.add.at(sent, src, size[chunk])
    return messages, sent


def one_chunk(n: int, **options: Any) -> int:
    """Return 1: the tensor is not split."""
    return 1


def consecutive_hosts(n: int, devices_per_host: int) -> Hosts:
    """Return hosts of consecutive ranks; the last host may have fewer.

    >>> consecutive_hosts(5, 2)
    [[0, 1], [2, 3], [4]]
    """
    return [list(range(i, min(i + devices_per_host, n))) for i in range(0, n, devices_per_host)]


def highest_bit(n: int) -> int:
    """Return the largest power of two that is at most ``n``.

    >>> highest_bit(12)
    8
    """
    return 1 << (n.bit_length() - 1)


def bits(n: int) -> list[int]:
    """Return the powers of two below ``n``, the distances in a tree or hypercube of n ranks.

    >>> bits(8), bits(9)
    ([1, 2, 4], [1, 2, 4, 8])
    """
    return [1 << k for k in range((n - 1).bit_length())]


def parents(n: int, other: bool = False) -> Ints:
    """Return each rank's parent in the balanced tree with the odd ranks as leaves; -1 for the root.

    Args:
        n: number of ranks.
        other: whether to return the second tree, mirrored for even n, shifted by one for odd n.

    Example:
        >>> parents(8)
        array([-1,  2,  4,  2,  0,  6,  4,  6])
        >>> parents(8, other=True)
        array([ 1,  3,  1,  7,  5,  3,  5, -1])
    """
    r = np.arange(n)
    lowest = r & -r
    up = (r ^ lowest) | (lowest << 1)
    up = np.where(up < n, up, r ^ lowest)
    up[0] = -1
    if other:
        position = n - 1 - r if n % 2 == 0 else (r - 1) % n
        rank_at = np.argsort(position)
        up = np.where(up[position] < 0, -1, rank_at[up[position]])
    return up


def depth(up: Ints) -> Ints:
    """Return the number of edges between each rank and the root, given :func:`parents`."""
    depths, ancestors = np.zeros(len(up), dtype=int), up
    while (ancestors >= 0).any():
        depths += ancestors >= 0
        ancestors = np.where(ancestors >= 0, up[ancestors], -1)
    return depths


# -- cost formulas ---------------------------------------------------------------------------


class LinkCost(Protocol):
    """The cost of a message; implemented by :class:`distkit_simulation.Link`."""

    @property
    def gamma(self) -> float:
        """Time to reduce a byte [s]."""

    def seconds(self, nbytes: Numbers) -> Numbers:
        """Return the time of a message [s]."""


def at_least(least: float, **named: Numbers) -> Numbers:
    """Convert to an array of floats and check its minimum.

    Raises:
        ValueError: A number is below ``least``.
    """
    ((name, numbers),) = named.items()
    array = np.asarray(numbers, float)
    if not np.all(array >= least):
        raise ValueError(f"{np.min(array):g} {name}: expected {least:g} or more")
    return array


def floor_lg(n: Numbers) -> Numbers:
    """Return ⌊log2 n⌋ for each number.

    >>> floor_lg(np.array([4, 5, 8])).tolist()
    [2.0, 2.0, 3.0]
    """
    return np.frexp(n)[1] - 1.0


def ceil_lg(n: Numbers) -> Numbers:
    """Return ⌈log2 n⌉ for each number.

    >>> ceil_lg(np.array([4, 5, 8])).tolist()
    [2.0, 3.0, 3.0]
    """
    return np.frexp(n - 0.5)[1] * 1.0
