"""The pages of the other all-reduces that take the tensor as a whole, or halve it.

All have the contract of ``dist.all_reduce(x, op, group)``, as
:func:`~distkit.algorithms.collectives.ring_all_reduce` has.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor, empty_like

from distkit.algorithms.contract import SUM, Group, ReduceOp, collective, combine
from distkit.algorithms.p2p import exchange, isend, recv, send
from distkit.algorithms.rounds import bits, highest_bit, offsets


@collective()
def reduce_broadcast_all_reduce(x: Tensor, op: ReduceOp = SUM, group: Group = None) -> None:
    """Reduce on rank 0, which then sends the result to everybody.

    ::

        1 ─┐          ┌─► 1
        2 ─┼─► 0: Σ ──┼─► 2
        3 ─┘          └─► 3

    2(n-1)(α + Kβ) + (n-1)Kγ: two rounds, in which everything passes through one rank's link.

    Source:
        TensorFlow, ``tf.distribute.ReductionToOneDevice``.
    """
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    if rank > 0:
        send(x, 0, group)
        recv(x, 0, group)
        return

    inbox = empty_like(x)
    for source in range(1, n):
        combine(x, recv(inbox, source, group), op)
    for to in range(1, n):
        send(x, to, group)


@collective()
def flat_all_reduce(x: Tensor, op: ReduceOp = SUM, group: Group = None) -> None:
    """Everybody sends everything to everybody, and reduces by itself.

    ::

        0 ◄──► 1
        ▲ ╲  ╱ ▲
        ▼ ╱  ╲ ▼
        2 ◄──► 3

    (n-1)(α + Kβ + Kγ), one message after the other, in one round. All reduce in the order of
    ranks, so that all round alike.

    Source:
        The "all-to-all" variant of Chan, Heimlich, Purkayastha & van de Geijn, "Collective
        communication: theory, practice, and experience", 2007.
    """
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    mine, inbox = x.clone(), empty_like(x)
    sending = [isend(mine, to, group) for to in range(n) if to != rank]

    for source in range(n):
        theirs = mine if source == rank else recv(inbox, source, group)
        if source == 0:
            x.copy_(theirs)
        else:
            combine(x, theirs, op)
    for work in sending:
        work.wait()


@collective()
def tree_all_reduce(x: Tensor, op: ReduceOp = SUM, group: Group = None) -> None:
    """Reduce up a binomial tree to rank 0, and broadcast down the same tree.

    ::

        round 0   1 ► 0   3 ► 2   5 ► 4   7 ► 6
        round 1   2 ────► 0       6 ────► 4
        round 2   4 ────────────► 0                  and back in reverse

    2⌈lg n⌉(α + Kβ) + ⌈lg n⌉Kγ: few rounds, but in each the whole tensor.

    Source:
        Thakur, Rabenseifner & Gropp, "Optimization of collective communication operations in
        MPICH", 2005.
    """
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    inbox = empty_like(x)
    children = []

    for bit in bits(n):
        if rank & bit:
            send(x, rank - bit, group)
            recv(x, rank - bit, group)
            break
        if rank + bit < n:
            children.append(rank + bit)
            combine(x, recv(inbox, rank + bit, group), op)

    for child in reversed(children):
        send(x, child, group)


# -- doubling: for powers of two, to which other numbers of ranks are folded -----------------


def fold(x: Tensor, op: ReduceOp, group: Group) -> list[int]:
    """Leave a power of two of ranks: of the first pairs, the even rank lets the odd one work.

    Returns:
        The ranks inside; on a rank outside, which has its result by then, none.
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
    """Give the result to the partner outside, if there is one."""
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    if rank < 2 * (n - highest_bit(n)):
        send(x, rank - 1, group)


@collective()
def recursive_doubling_all_reduce(x: Tensor, op: ReduceOp = SUM, group: Group = None) -> None:
    """Exchange everything with partners at distances 1, 2, 4 and so on.

    After k rounds each rank holds the sum of 2^k::

        round 0   0 ◄► 1   2 ◄► 3        round 1   0 ◄───► 2   1 ◄───► 3

    lg n (α + Kβ + Kγ): no algorithm takes fewer rounds. Two more when n is no power of two.

    Source:
        Thakur, Rabenseifner & Gropp, 2005.
    """
    ranks = fold(x, op, group)
    if not ranks:
        return
    place, inbox = ranks.index(dist.get_rank(group)), empty_like(x)

    for bit in bits(len(ranks)):
        partner = ranks[place ^ bit]
        combine(x, exchange(x, partner, inbox, partner, group), op)

    unfold(x, group)


@collective()
def halving_doubling_all_reduce(x: Tensor, op: ReduceOp = SUM, group: Group = None) -> None:
    """Halve what is exchanged in each round, then double it again: Rabenseifner's algorithm.

    *Reduce-scatter*: partners at distance n/2, n/4, … give each other the half that the other
    one keeps. *All-gather*: the same way back. What is complete is in brackets::

        rank 0    0 1 2 3  ──►   0 1  ──►  [0]  ──►  [0 1]  ──►  [0 1 2 3]
        rank 3    0 1 2 3  ──►   2 3  ──►  [3]  ──►  [2 3]  ──►  [0 1 2 3]

    2 lg n α + 2(n-1)/n Kβ + (n-1)/n Kγ: a ring's bytes in a tree's rounds. Two rounds of K
    bytes more when n is no power of two.

    Source:
        Rabenseifner, "Optimization of collective reduction operations", 2004.
    """
    ranks = fold(x, op, group)
    if not ranks:
        return
    place, n = ranks.index(dist.get_rank(group)), len(ranks)
    start = offsets(len(x), n)
    inbox = x.new_empty(start[(n + 1) // 2])

    def block(of: int, size: int) -> Tensor:
        """The block of ``size`` chunks that chunk ``of`` is in."""
        first = of & -size
        return x[start[first] : start[first + size]]

    for bit in reversed(bits(n)):  # reduce-scatter
        partner, out, mine = ranks[place ^ bit], block(place ^ bit, bit), block(place, bit)
        combine(mine, exchange(out, partner, inbox[: len(mine)], partner, group), op)

    for bit in bits(n):  # all-gather
        partner = ranks[place ^ bit]
        exchange(block(place, bit), partner, block(place ^ bit, bit), partner, group)

    unfold(x, group)
