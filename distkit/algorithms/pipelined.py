"""The pages of the all-reduces that cut the tensor in segments, several of them on their way."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor, empty_like

from distkit.algorithms.contract import SUM, Group, ReduceOp, collective, combine
from distkit.algorithms.p2p import irecv, isend, recv
from distkit.algorithms.trees import depth, parents


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
