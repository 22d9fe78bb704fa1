"""Recursive halving and doubling: reduce by exchanging halves, quarters, …, then gather back."""

from __future__ import annotations

import numpy as np
import torch.distributed as dist
from torch import Tensor

from distkit.algorithms.all_reduce import ALL_REDUCES
from distkit.algorithms.all_reduce.recursive_doubling import (
    fold,
    fold_schedule,
    folding_seconds,
    unfold,
)
from distkit.algorithms.contract import SUM, Group, ReduceOp, collective, combine, exchange
from distkit.algorithms.rounds import (
    LinkCost,
    Numbers,
    Round,
    Schedule,
    bits,
    floor_lg,
    highest_bit,
    offsets,
)


def schedule(n: int) -> Schedule:
    """Yield reduce-scatter rounds, which halve the size, then all-gather rounds, which double it.

    Example:
        >>> [(t.chunk.tolist(), t.count) for t in schedule(4)][:2]
        [([2, 2, 0, 0], 2), ([1, 0, 3, 2], 1)]
    """
    return fold_schedule(n, _halve_and_double(highest_bit(n)), chunks=highest_bit(n))


def _halve_and_double(p: int) -> Schedule:
    r = np.arange(p)
    for bit in reversed(bits(p)):  # send the partner's half
        yield Round(r, r ^ bit, (r ^ bit) & -bit, reduce=True, count=bit)
    for bit in bits(p):
        yield Round(r, r ^ bit, r & -bit, reduce=False, count=bit)


def seconds(n: Numbers, nbytes: Numbers, link: LinkCost) -> Numbers:
    """Return 2 lg n·alpha + 2(n-1)/n K·beta + (n-1)/n K·gamma, plus folding.

    Folding applies if n is not a power of two. Rabenseifner, 2004; used in Gloo and by Goyal et
    al., 2017.
    """
    rounds = floor_lg(n)
    total: Numbers = 0.0
    for i in range(1, int(np.max(rounds)) + 1):
        total = total + np.where(i <= rounds, 2 * link.seconds(nbytes / 2.0**i), 0.0)
    reduced = (1 - 1 / np.exp2(rounds)) * nbytes
    return total + reduced * link.gamma + folding_seconds(n, nbytes, link)


@ALL_REDUCES.register(
    title="Recursive halving and doubling",
    summary="partners exchange halves, quarters, … to reduce, then gather in reverse order",
    source="Rabenseifner, 2004",
    cost="2 lg n α + 2(n-1)/n Kβ + (n-1)/n Kγ",
    schedule=schedule,
    seconds=seconds,
    chunks=highest_bit,
)
@collective()
def halving_doubling_all_reduce(x: Tensor, op: ReduceOp = SUM, group: Group = None) -> None:
    """Halve the exchanged size each round, then double it again: Rabenseifner's algorithm.

    *Reduce-scatter*: partners at distance n/2, n/4, … send each other the half that the other
    keeps. *All-gather*: the same in reverse. Complete chunks are in brackets::

        rank 0    0 1 2 3  ──►   0 1  ──►  [0]  ──►  [0 1]  ──►  [0 1 2 3]
        rank 3    0 1 2 3  ──►   2 3  ──►  [3]  ──►  [2 3]  ──►  [0 1 2 3]

    Cost: 2 lg n α + 2(n-1)/n Kβ + (n-1)/n Kγ, with as many bytes as in a ring and as many
    rounds as in a tree. If n is not a power of two, two rounds of K bytes are added.

    Source:
        Rabenseifner, "Optimization of collective reduction operations", 2004.
    """
    ranks = fold(x, op, group)
    if not ranks:
        return
    position, n = ranks.index(dist.get_rank(group)), len(ranks)
    start = offsets(len(x), n)
    recv_buffer = x.new_empty(start[(n + 1) // 2])

    def block(chunk: int, size: int) -> Tensor:
        """Return the block of ``size`` chunks that contains ``chunk``."""
        first = chunk & -size
        return x[start[first] : start[first + size]]

    for bit in reversed(bits(n)):  # reduce-scatter
        partner, out, local = (
            ranks[position ^ bit],
            block(position ^ bit, bit),
            block(position, bit),
        )
        combine(local, exchange(out, partner, recv_buffer[: len(local)], partner, group), op)

    for bit in bits(n):  # all-gather
        partner = ranks[position ^ bit]
        exchange(block(position, bit), partner, block(position ^ bit, bit), partner, group)

    unfold(x, group)
