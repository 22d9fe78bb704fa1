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
    folded,
    highest_bit,
    one_chunk,
)


def schedule(n: int) -> Schedule:
    """Yield the rounds: partners at distance 1, 2, 4, … exchange their whole tensors.

    Ranks beyond a power of two are folded in: the first 2(n-p) ranks pair up, and the even rank of
    each pair sends its tensor to the odd one.
    """
    return to_power_of_two(n, _doubling(highest_bit(n)), chunks=1)


def _doubling(p: int) -> Schedule:
    r = np.arange(p)
    for bit in bits(p):
        yield Round(r, r ^ bit, np.zeros_like(r), reduce=True)


def seconds(n: Numbers, nbytes: Numbers, link: LinkCost) -> Numbers:
    """Return ⌊lg n⌋ (t(K) + K·gamma), plus 2t(K) + K·gamma if n is not a power of two.

    Thakur, Rabenseifner & Gropp, 2005.
    """
    return floor_lg(n) * (link.seconds(nbytes) + nbytes * link.gamma) + folded_seconds(
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

    After k rounds, each rank has the sum of 2^k ranks::

        round 0   0 ◄► 1   2 ◄► 3        round 1   0 ◄───► 2   1 ◄───► 3

    lg n (α + Kβ + Kγ): no algorithm needs fewer rounds. If n is not a power of two, two are added.

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


# -- folding to a power of two ranks ---------------------------------------------------------


def to_power_of_two(n: int, inner: Schedule, chunks: int) -> Schedule:
    """Fold n ranks to a power of two ranks, which run ``inner``."""
    outside = np.arange(0, 2 * (n - highest_bit(n)), 2)
    inside = np.setdiff1d(np.arange(n), outside)
    rounds = (Round(inside[t.src], inside[t.dst], t.chunk, t.reduce, t.count) for t in inner)
    return folded(rounds, outside, outside + 1, chunks)


def folded_seconds(n: Numbers, nbytes: Numbers, link: LinkCost) -> Numbers:
    """Return the time to send the tensor to a partner first and to receive the sum at the end."""
    return (n != np.exp2(floor_lg(n))) * (2 * link.seconds(nbytes) + nbytes * link.gamma)


def fold(x: Tensor, op: ReduceOp, group: Group) -> list[int]:
    """Fold to a power of two ranks: in the first pairs, the odd rank represents the even one.

    Returns:
        The remaining ranks; a represented rank returns [] after it has received the result.
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
    """Send the result to the rank that this rank represents, if any."""
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    if rank < 2 * (n - highest_bit(n)):
        send(x, rank - 1, group)
