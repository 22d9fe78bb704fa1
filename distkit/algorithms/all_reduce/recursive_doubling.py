"""Recursive doubling: partners at distance 1, 2, 4, … exchange everything."""

from __future__ import annotations

import numpy as np
import torch.distributed as dist
from torch import Tensor, empty_like

from distkit.algorithms.all_reduce import ALL_REDUCES
from distkit.algorithms.contract import (
    SUM,
    Group,
    ReduceOp,
    collective,
    combine,
    exchange,
    recv,
    send,
)
from distkit.algorithms.rounds import (
    LinkCost,
    Numbers,
    Round,
    Schedule,
    bits,
    floor_lg,
    highest_bit,
    one_chunk,
    with_folded_ranks,
)


def schedule(n: int) -> Schedule:
    """Yield the rounds: partners at distance 1, 2, 4, … exchange their whole tensors.

    If n is not a power of two and p is the largest power of two below n, the first 2(n-p) ranks are
    folded into n-p: the even rank of each pair sends its tensor to the odd one.
    """
    return fold_schedule(n, _doubling(highest_bit(n)), chunks=1)


def _doubling(p: int) -> Schedule:
    r = np.arange(p)
    for bit in bits(p):
        yield Round(r, r ^ bit, np.zeros_like(r), reduce=True)


def seconds(n: Numbers, nbytes: Numbers, link: LinkCost) -> Numbers:
    """Return ⌊lg n⌋ (t(K) + K·gamma), plus 2t(K) + K·gamma if n is not a power of two.

    Thakur, Rabenseifner & Gropp, 2005.
    """
    return floor_lg(n) * (link.seconds(nbytes) + nbytes * link.gamma) + folding_seconds(
        n, nbytes, link
    )


@ALL_REDUCES.register(
    title="Recursive doubling",
    summary="partners at distance 1, 2, 4, … exchange everything",
    source="Thakur et al., 2005",
    cost="lg n (α + Kβ + Kγ)",
    schedule=schedule,
    seconds=seconds,
    chunks=one_chunk,
)
@collective()
def recursive_doubling_all_reduce(x: Tensor, op: ReduceOp = SUM, group: Group = None) -> None:
    """Exchange the whole tensor with partners at distance 1, 2, 4 and so on.

    After k rounds, each rank holds the reduction over 2^k ranks::

        round 0   0 ◄► 1   2 ◄► 3        round 1   0 ◄───► 2   1 ◄───► 3

    Cost: lg n (α + Kβ + Kγ) if n is a power of two; no algorithm needs fewer rounds. Otherwise,
    folding adds two rounds to ⌊lg n⌋.

    Source:
        Thakur, Rabenseifner & Gropp, 2005.
    """
    ranks = fold(x, op, group)
    if not ranks:
        return
    position, recv_buffer = ranks.index(dist.get_rank(group)), empty_like(x)

    for bit in bits(len(ranks)):
        partner = ranks[position ^ bit]
        combine(x, exchange(x, partner, recv_buffer, partner, group), op)

    unfold(x, group)


# -- folding to a power-of-two number of ranks -----------------------------------------------


def fold_schedule(n: int, inner: Schedule, chunks: int) -> Schedule:
    """Fold n ranks down to the largest power of two; the remaining ranks run ``inner``."""
    folded = np.arange(0, 2 * (n - highest_bit(n)), 2)
    remaining = np.setdiff1d(np.arange(n), folded)
    rounds = (Round(remaining[t.src], remaining[t.dst], t.chunk, t.reduce, t.count) for t in inner)
    return with_folded_ranks(rounds, folded, folded + 1, chunks)


def folding_seconds(n: Numbers, nbytes: Numbers, link: LinkCost) -> Numbers:
    """Return the time of folding: two transfers and a reduction, or 0 for a power of two."""
    return (n != np.exp2(floor_lg(n))) * (2 * link.seconds(nbytes) + nbytes * link.gamma)


def fold(x: Tensor, op: ReduceOp, group: Group) -> list[int]:
    """Fold the group of n ranks down to the largest power of two p.

    In each of the first n-p pairs, the even rank sends its tensor to the odd rank, which takes part
    on behalf of both. On the even rank, the call blocks until the result has arrived.

    Returns:
        The remaining ranks, or [] on a folded rank.
    """
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    pairs = 2 * (n - highest_bit(n))
    if rank < pairs and rank % 2 == 0:
        send(x, rank + 1, group)
        recv(x, rank + 1, group)
        return []
    if rank < pairs:
        combine(x, recv(empty_like(x), rank - 1, group), op)
    return [*range(1, pairs, 2), *range(pairs, n)]


def unfold(x: Tensor, group: Group) -> None:
    """Send the result to the rank folded into this rank, if any."""
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    if rank < 2 * (n - highest_bit(n)):
        send(x, rank - 1, group)
