"""The pages of the other all-reduces; and gossip, for contrast, which is none.

First those that take the tensor as a whole, or halve it; then those that cut it in segments,
several of them on their way; at last those that know of hosts, with slower links between them than
inside.

All have the contract of ``dist.all_reduce(x, op, group)``, as
:func:`~distkit.algorithms.collectives.ring_all_reduce` has.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor, empty_like

from distkit.algorithms.contract import (
    SUM,
    Group,
    ReduceOp,
    collective,
    combine,
    exchange,
    irecv,
    isend,
    recv,
    send,
)
from distkit.algorithms.hosts import hosts_of
from distkit.algorithms.rounds import (
    Hosts,
    bits,
    depth,
    highest_bit,
    neighbours,
    offsets,
    parents,
    placed,
)
from distkit.algorithms.schedules import columns, grid


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


# -- segments --------------------------------------------------------------------------------


@collective()
def pipelined_ring_all_reduce(
    x: Tensor, op: ReduceOp = SUM, group: Group = None, *, segments: int = 2
) -> None:
    """The ring, with each chunk cut in segments: one is reduced while the next is on its way.

    ::

        receive   a1  a2  b1  b2  c1  c2
        reduce        a1  a2  b1  b2  c1  c2
        send on           a1  a2  b1  b2  c1  c2

    2(n-1)·S α + 2(n-1)/n Kβ + (n-1)/(nS) Kγ with S segments: more messages, hidden arithmetic.

    Args:
        x: tensor of any shape, the same on every rank; K bytes.
        op: SUM, AVG, MIN, MAX or PRODUCT.
        group: the process group; None is the world.
        segments: pieces per chunk, S.

    Source:
        Gloo, ``allreduce_ring_chunked``, with two segments.
    """
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    left, right = (rank - 1) % n, (rank + 1) % n
    pieces = x.tensor_split(n * segments)
    inboxes = [empty_like(pieces[0]) for _ in range(segments)]
    if n == 1:
        return

    def step(s: int) -> tuple[Tensor, ...]:
        """The segments that come in step s-1 and go on in step s."""
        first = (rank - s) % n * segments
        return pieces[first : first + segments]

    sending = [isend(out, right, group) for out in step(0)]
    for s in range(1, 2 * n - 1):  # n-1 steps of reduce-scatter, n-1 of all-gather
        reduces, mine = s < n, step(s)
        into = [b[: len(m)] for b, m in zip(inboxes, mine, strict=True)] if reduces else mine
        coming = [irecv(t, left, group) for t in into]
        for j in range(segments):
            coming[j].wait()
            if reduces:
                combine(mine[j], into[j], op)
            sending[j].wait()
            if s < 2 * n - 2:
                sending[j] = isend(mine[j], right, group)


@collective()
def double_tree_all_reduce(
    x: Tensor, op: ReduceOp = SUM, group: Group = None, *, segments: int = 4
) -> None:
    """Two trees, each for half of the data; who is a leaf in one works in the other.

    ::

        tree 0        0              tree 1              7
                      └── 4                          3 ──┘
                      2 ──┴── 6                  1 ──┴── 5
                    1─┴─3   5─┴─7              0─┴─2   4─┴─6

    Each half goes up its tree and down again in S segments, one level in each round, both ways
    at the same time: some S + 2⌈lg n⌉ rounds, a number that grows with lg n and not with n.

    Args:
        x: tensor of any shape, the same on every rank; K bytes.
        op: SUM, AVG, MIN, MAX or PRODUCT.
        group: the process group; None is the world.
        segments: pieces per half, S.

    Source:
        Sanders, Speck & Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and
        scan", 2009; these trees: Jeaugey, "Massively scale your deep learning training with
        NCCL 2.4", 2019.
    """
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    pieces, trees = x.tensor_split(2 * segments), []
    for half, up in (pieces[:segments], parents(n)), (pieces[segments:], parents(n, other=True)):
        children = [r for r in range(n) if up[r] == rank]
        trees.append((half, depth(up), int(up[rank]), children))
    deepest, inbox, numbers = max(trees[0][1]), empty_like(pieces[0]), range(segments)

    for t in range(segments + 2 * deepest - 1):
        sending = []
        for half, deep, parent, children in trees:
            rises, sinks = t - deepest + deep[rank], t - deepest - deep[rank]
            if parent >= 0 and rises in numbers:
                sending.append(isend(half[rises], parent, group))
            if sinks in numbers:
                sending += [isend(half[sinks], c, group) for c in children]
        for half, deep, parent, children in trees:
            rises, sinks = t + 1 - deepest + deep[rank], t + 1 - deepest - deep[rank]
            for child in children if rises in numbers else []:
                mine = half[rises]
                combine(mine, recv(inbox[: len(mine)], child, group), op)
            if parent >= 0 and sinks in numbers:
                recv(half[sinks], parent, group)
        for work in sending:
            work.wait()


# -- hosts -----------------------------------------------------------------------------------


def go_round(
    chunks: Sequence[Tensor],
    first: int,
    left: int,
    right: int,
    group: Group,
    op: ReduceOp | None = None,
) -> None:
    """One trip round a ring: pass on chunk ``first``, and then always what came last.

    Args:
        chunks: as many as ranks on the ring.
        first: the chunk that this rank passes on first.
        left: neighbour in the group to receive from.
        right: neighbour in the group to send to.
        group: the process group.
        op: how to combine what comes with one's own; None replaces one's own by it.
    """
    m, inbox = len(chunks), empty_like(chunks[0])
    for s in range(m - 1):
        out, mine = chunks[(first - s) % m], chunks[(first - s - 1) % m]
        if op is None:
            exchange(out, right, mine, left, group)
        else:
            combine(mine, exchange(out, right, inbox[: len(mine)], left, group), op)


def ring_of(leaders: Sequence[int], x: Tensor, op: ReduceOp, group: Group) -> None:
    """All-reduce between some ranks of the group, this one among them, in a ring."""
    n, place = len(leaders), leaders.index(dist.get_rank(group))
    left, right = leaders[place - 1], leaders[(place + 1) % n]
    chunks = x.tensor_split(n)
    go_round(chunks, place, left, right, group, op)
    go_round(chunks, place + 1, left, right, group)


def laid_out(group: Group, devices_per_host: int | None, hosts: Hosts | None) -> Hosts | None:
    """The ranks of each host, as given or as they are; None if all are on one host."""
    n = dist.get_world_size(group)
    if hosts is not None:
        return placed(n, hosts)
    if devices_per_host is not None:
        return neighbours(n, devices_per_host)
    found = hosts_of(group)
    return found if len(found) > 1 else None


@collective()
def hierarchical_all_reduce(
    x: Tensor,
    op: ReduceOp = SUM,
    group: Group = None,
    *,
    devices_per_host: int | None = None,
    hosts: Hosts | None = None,
) -> None:
    """Reduce inside each host to its leader, all-reduce between the leaders, broadcast inside.

    ::

        host 0     1 ─► 0 ◄─ 2         0            0 ─► 1, 2
                                   ring ╲
        host 1     4 ─► 3 ◄─ 5         ► 3          3 ─► 4, 5

    Of g devices per host and m hosts: 2(α + (g-1)Kβ) inside, 2(m-1)α + 2(m-1)/m Kβ between.

    Args:
        x: tensor of any shape, the same on every rank; K bytes.
        op: SUM, AVG, MIN, MAX or PRODUCT.
        group: the process group; None is the world.
        devices_per_host: ranks of a host, which are neighbours; the last host may have fewer.
        hosts: the ranks of each host instead, its leader first. Without either, those that are
            really on each; where all are on one, two on each are imagined.

    Source:
        TensorFlow, ``tf.distribute.HierarchicalCopyAllReduce``; the ring between hosts: Horovod,
        ``HOROVOD_HIERARCHICAL_ALLREDUCE``.
    """
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    hosts = laid_out(group, devices_per_host, hosts) or neighbours(n, 2)
    leader, *devices = next(host for host in hosts if rank in host)
    if rank != leader:
        send(x, leader, group)
        recv(x, leader, group)
        return

    inbox = empty_like(x)
    for device in devices:
        combine(x, recv(inbox, device, group), op)

    ring_of([host[0] for host in hosts], x, op, group)

    for device in devices:
        send(x, device, group)


@collective()
def torus_all_reduce(
    x: Tensor,
    op: ReduceOp = SUM,
    group: Group = None,
    *,
    devices_per_host: int | None = None,
    hosts: Hosts | None = None,
) -> None:
    """Rings along the rows and the columns of a grid of m hosts with g devices each.

    Reduce-scatter along the row, all-reduce of that shard along the column, all-gather along
    the row::

        host 0    0 ─► 1 ─► 2 ─┐       between hosts each device
                  ▼    ▼    ▼          passes only K/g bytes
        host 1    3 ─► 4 ─► 5 ─┐

    2(g-1 + m-1)α + 2(n-1)/n Kβ: a ring's bytes in fewer rounds. Of those 2(g-1)/g Kβ stay
    inside the host, and 2(m-1)/m K/g β go between hosts.

    Args:
        x: tensor of any shape, the same on every rank; K bytes.
        op: SUM, AVG, MIN, MAX or PRODUCT.
        group: the process group; None is the world.
        devices_per_host: g, which divides the number of ranks.
        hosts: the ranks of each host instead; of a larger one than the smallest the others give
            all they have to one of it first, and get the result last. Without either, those that
            are really on each; where all are on one, a grid as square as can be.

    Source:
        Ying et al., "Image classification at supercomputer scale", 2018; Mikami et al.,
        "Massively distributed SGD", 2018.
    """
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    if devices_per_host is not None:
        columns(n, devices_per_host)  # it has no gaps
    hosts = laid_out(group, devices_per_host, hosts) or neighbours(n, columns(n))
    rows, outside = grid(hosts)
    for extra, partner in outside:
        if rank == extra:
            send(x, partner, group)
            recv(x, partner, group)
            return
        if rank == partner:
            combine(x, recv(empty_like(x), extra, group), op)

    m, g = len(rows), len(rows[0])
    row = next(i for i in range(m) if rank in rows[i])
    column = rows[row].index(rank)
    left, right = rows[row][column - 1], rows[row][(column + 1) % g]
    above, below = rows[row - 1][column], rows[(row + 1) % m][column]

    start = offsets(len(x), m * g)
    shards = [x[start[i * m] : start[(i + 1) * m]] for i in range(g)]
    mine = (column + 1) % g  # the shard that this column completes
    pieces = [x[start[i] : start[i + 1]] for i in range(mine * m, (mine + 1) * m)]

    go_round(shards, column, left, right, group, op)
    go_round(pieces, row, above, below, group, op)
    go_round(pieces, row + 1, above, below, group)
    go_round(shards, column + 1, left, right, group)

    for extra, partner in outside:
        if rank == partner:
            send(x, extra, group)


@collective()
def gossip_average(x: Tensor, group: Group = None, *, rounds: int = 1) -> None:
    """Average ``x`` with both neighbours on a ring, in place. **No** all-reduce.

    ::

        x_r ← (x_{r-1} + x_r + x_{r+1}) / 3

    Everybody's mean stays what it was, and the ranks come nearer to it from round to round, by
    a factor of (1 + 2 cos 2π/n)/3. A round takes 2α + 2Kβ, however many ranks there are: that is
    what decentralised SGD buys with ranks that differ.

    Args:
        x: floating-point tensor of any shape, the same on every rank; K bytes.
        group: the process group; None is the world.
        rounds: how often.

    Source:
        Lian et al., "Can decentralized algorithms outperform centralized algorithms?", 2017.
    """
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    left, right = (rank - 1) % n, (rank + 1) % n
    if n == 1:
        return

    from_left, from_right = empty_like(x), empty_like(x)
    for _ in range(rounds):
        exchange(x, right, from_left, left, group)
        exchange(x, left, from_right, right, group)
        x.add_(from_left).add_(from_right).div_(3)
