"""Pipelined ring: a ring of chunks in segments: one is reduced while the next is on its way."""

from __future__ import annotations

import numpy as np
import torch.distributed as dist
from torch import Tensor, empty_like

from distkit.algorithms.all_reduce import ALL_REDUCES, ring
from distkit.algorithms.contract import SUM, Group, ReduceOp, collective, combine, irecv, isend
from distkit.algorithms.rounds import LinkCost, Numbers, Round, Schedule, at_least


def schedule(n: int, segments: int = 2) -> Schedule:
    """The ring with each chunk cut in segments: one is reduced while the next is on its way.

    Args:
        n: number of ranks.
        segments: pieces per chunk.
    """
    for t in ring.schedule(n):
        for segment in range(segments):
            yield Round(t.src, t.dst, t.chunk * segments + segment, t.reduce)


def seconds(n: Numbers, nbytes: Numbers, link: LinkCost, *, segments: Numbers = 2) -> Numbers:
    """2(n-1) S·t(K/nS): segments are summed during the next transfer, if sums are as fast.

    With one segment it is the ring. Patarasuk & Yuan, 2009; Gloo's ``ring_chunked``.
    """
    s = at_least(1, segments=segments)
    each = link.seconds(nbytes / n / s)
    adding = nbytes / n / s * link.gamma
    alone = (n - 1) * (2 * each + adding)
    return np.where(s > 1, (n - 1) * s * (each + np.maximum(each, adding)), alone)


@ALL_REDUCES.register(
    title="Pipelined ring",
    summary="a ring of chunks in segments: one is reduced while the next is on its way",
    source="Gloo's ring_chunked",
    cost="2(n-1)Sα + 2(n-1)/n Kβ, S > 1 segments, if β > γ",
    schedule=schedule,
    seconds=seconds,
    chunks=lambda n, segments=2: n * segments,
)
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
