"""Double binary tree: two trees, each for half of the data, use all links in both directions."""

from __future__ import annotations

import numpy as np
import torch.distributed as dist
from torch import Tensor, empty_like

from distkit.algorithms.all_reduce import ALL_REDUCES
from distkit.algorithms.contract import SUM, Group, ReduceOp, collective, combine, isend, recv
from distkit.algorithms.rounds import (
    LinkCost,
    Numbers,
    Round,
    Schedule,
    at_least,
    ceil_lg,
    depth,
    parents,
)


def schedule(n: int, segments: int = 4) -> Schedule:
    """Yield the rounds: two trees, each for half of the data.

    Leaves of one tree are inner nodes of the other. Each half moves up and down in segments. In
    round t, a rank at depth d sends segment t - (D-d) up and segment t - (D+d) down, where D is
    the depth of the tree.

    Args:
        n: number of ranks.
        segments: number of segments per half.
    """
    trees = [parents(n), parents(n, other=True)]
    depths = [depth(up) for up in trees]
    deepest = int(depths[0].max())
    for t in range(segments + 2 * deepest - 1 if n > 1 else 0):
        moves = []
        for half, (up, d) in enumerate(zip(trees, depths, strict=True)):
            child = np.flatnonzero(up >= 0)
            up_segment, down_segment = t - deepest + d[child], t - deepest - d[child] + 1
            for src, dst, k, adds in [
                (child, up[child], up_segment, True),
                (up[child], child, down_segment, False),
            ]:
                active = (k >= 0) & (k < segments)
                moves.append(
                    (
                        src[active],
                        dst[active],
                        half * segments + k[active],
                        np.full(active.sum(), adds),
                    )
                )
        yield Round(*(np.concatenate(column) for column in zip(*moves, strict=True)))


def seconds(n: Numbers, nbytes: Numbers, link: LinkCost, *, segments: Numbers = 4) -> Numbers:
    """Return (S + 2⌈lg n⌉ - 1) (4 t(K/2S) + K/S·gamma), an upper bound.

    In each round, a rank has at most four messages and two reductions. The bound is valid for up to
    eight segments. With many more segments, ranks in different rounds wait for each other, and the
    time is up to 50% longer. Sanders, Speck & Träff, 2009.
    """
    s = at_least(1, segments=segments)
    round_seconds = 4 * link.seconds(nbytes / 2 / s) + nbytes / s * link.gamma
    return (s + 2 * ceil_lg(n) - 1) * round_seconds * (n > 1)


@ALL_REDUCES.register(
    title="Double binary tree",
    summary="two trees, each for half of the data, use all links in both directions",
    source="Sanders et al., 2009; NCCL 2.4",
    cost="at most (S + 2⌈lg n⌉ - 1)(4α + 2K/S β + K/S γ), S ≤ 8 segments",
    schedule=schedule,
    seconds=seconds,
    chunks=lambda n, segments=4: 2 * segments,
)
@collective()
def double_tree_all_reduce(
    x: Tensor, op: ReduceOp = SUM, group: Group = None, *, segments: int = 4
) -> None:
    """All-reduce along two trees, each for half of the data.

    Leaves of one tree are inner nodes of the other::

        tree 0        0              tree 1              7
                      └── 4                          3 ──┘
                      2 ──┴── 6                  1 ──┴── 5
                    1─┴─3   5─┴─7              0─┴─2   4─┴─6

    Each half moves up its tree and down again in S segments, one level per round, in both
    directions at the same time: about S + 2⌈lg n⌉ rounds, of which only 2⌈lg n⌉ depend on n.

    Args:
        x: tensor of K bytes, with the same shape on every rank.
        op: SUM, MIN, MAX or PRODUCT.
        group: the process group; None means the default group.
        segments: S, the number of segments per half.

    Source:
        Sanders, Speck & Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and
        scan", 2009; these trees: Jeaugey, "Massively scale your deep learning training with
        NCCL 2.4", 2019.
    """
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    chunks, trees = x.tensor_split(2 * segments), []
    for half, up in (chunks[:segments], parents(n)), (chunks[segments:], parents(n, other=True)):
        children = [r for r in range(n) if up[r] == rank]
        trees.append((half, depth(up), int(up[rank]), children))
    deepest, recv_buffer, valid = max(trees[0][1]), empty_like(chunks[0]), range(segments)

    for t in range(segments + 2 * deepest - 1):
        works = []
        for half, depths, parent, children in trees:
            up_segment, down_segment = t - deepest + depths[rank], t - deepest - depths[rank]
            if parent >= 0 and up_segment in valid:
                works.append(isend(half[up_segment], parent, group))
            if down_segment in valid:
                works += [isend(half[down_segment], c, group) for c in children]
        for half, depths, parent, children in trees:
            up_segment, down_segment = (
                t + 1 - deepest + depths[rank],
                t + 1 - deepest - depths[rank],
            )
            for child in children if up_segment in valid else []:
                local = half[up_segment]
                combine(local, recv(recv_buffer[: len(local)], child, group), op)
            if parent >= 0 and down_segment in valid:
                recv(half[down_segment], parent, group)
        for work in works:
            work.wait()
