"""Collectives other than all-reduce: schedules and reference implementations.

A reference implementation follows the contract of its ``torch.distributed`` counterpart, and can
replace it in calls that are not asynchronous. :func:`copy_to_ranks` and
:func:`sum_of_ranks` have gradients: the backward pass of each is the other's forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
import torch.distributed as dist
from torch import Tensor, autograd, cat, contiguous_format, empty, empty_like
from torch.distributed.distributed_c10d import _get_default_group

from distkit.algorithms.catalog import Algorithms
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
    Ints,
    Round,
    Schedule,
    bits,
    highest_bit,
    one_chunk,
    ring_rounds,
)

#: Collectives by name.
COLLECTIVES = Algorithms()


# -- rooted collectives ----------------------------------------------------------------


def tree_neighbors(root: int, group: Group) -> tuple[int, int | None, list[tuple[int, int]], int]:
    """Return this rank's place in the binomial tree whose root is the world rank ``root``.

    Returns:
        The group ranks of the root and of the parent; the children as pairs of group rank and
        distance, with the largest subtree first; and the number of ranks in this node's subtree.
    """
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    group_root = dist.get_group_rank(group or _get_default_group(), root)
    position = (rank - group_root) % n  # relative to the root
    lowest = position & -position if position else highest_bit(2 * n - 1)  # lowest set bit
    children = [((rank + bit) % n, bit) for bit in reversed(bits(lowest)) if position + bit < n]
    parent = (rank - lowest) % n if position else None
    return group_root, parent, children, min(lowest, n - position)


def _tree(n: int, root: int) -> Iterator[tuple[Ints, Ints, Ints, Ints]]:
    """Yield the edges of a binomial tree, from the root to the leaves.

    Yields:
        Four arrays: the parents, the children, and for each child's subtree, its first rank
        (relative to the root) and its size.
    """
    for bit in reversed(bits(n)):
        parent = np.arange(0, n - bit, 2 * bit)
        child = parent + bit
        yield (parent + root) % n, (child + root) % n, child, np.minimum(bit, n - child)


def broadcast_schedule(n: int, root: int = 0) -> Schedule:
    """Yield the rounds; in each round, the ranks that have the tensor send it to others."""
    for parent, child, _, _ in _tree(n, root):
        yield Round(parent, child, np.zeros_like(child), reduce=False)


@COLLECTIVES.register(
    title="Broadcast",
    summary="a binomial tree down from the root",
    source="Thakur et al., 2005",
    cost="⌈lg n⌉(α + Kβ)",
    schedule=broadcast_schedule,
    chunks=one_chunk,
)
@collective()
def broadcast(tensor: Tensor, src: int = 0, group: Group = None) -> None:
    """Broadcast the tensor of rank ``src`` to every rank, as ``dist.broadcast`` does.

    A *binomial tree*: in each round, every rank that has the tensor forwards it::

        0 ─────────────► 4          round 0
        0 ─────► 2       4 ─────► 6
        0 ► 1    2 ► 3   4 ► 5    6 ► 7

    Cost: ⌈lg n⌉(α + Kβ); no algorithm needs fewer rounds.

    Args:
        tensor: K bytes, with the same shape on every rank.
        src: the world rank of the root.
        group: the process group; None means the default group.

    Source:
        Thakur, Rabenseifner & Gropp, "Optimization of collective communication operations in
        MPICH", 2005.
    """
    _, parent, children, _ = tree_neighbors(src, group)
    if parent is not None:
        recv(tensor, parent, group)
    for child, _ in children:
        send(tensor, child, group)


def reduce_schedule(n: int, root: int = 0) -> Schedule:
    """Yield the rounds of :func:`broadcast_schedule` in reverse."""
    for parent, child, _, _ in reversed([*_tree(n, root)]):
        yield Round(child, parent, np.zeros_like(child), reduce=True)


@COLLECTIVES.register(
    title="Reduce",
    summary="a binomial tree up to the root",
    source="Thakur et al., 2005",
    cost="⌈lg n⌉(α + Kβ + Kγ)",
    schedule=reduce_schedule,
    chunks=one_chunk,
)
@collective()
def reduce(tensor: Tensor, dst: int = 0, op: ReduceOp = SUM, group: Group = None) -> None:
    """Reduce to rank ``dst``, as ``dist.reduce`` does; other ranks' tensors do not change.

    Partial results move up the binomial tree of :func:`broadcast`, from the leaves to the root.
    Cost: ⌈lg n⌉(α + Kβ + Kγ).

    Args:
        tensor: K bytes, with the same shape on every rank.
        dst: the world rank of the root.
        op: SUM, MIN, MAX or PRODUCT.
        group: the process group; None means the default group.

    Source:
        Thakur, Rabenseifner & Gropp, 2005.
    """
    _, parent, children, _ = tree_neighbors(dst, group)
    partial, recv_buffer = tensor if parent is None else tensor.clone(), empty_like(tensor)

    for child, _ in reversed(children):
        combine(partial, recv(recv_buffer, child, group), op)
    if parent is not None:
        send(partial, parent, group)


def scatter_schedule(n: int, root: int = 0) -> Schedule:
    """Yield the rounds: each message carries a subtree's chunks; chunk i is for rank root + i."""
    for parent, child, first, count in _tree(n, root):
        yield Round(parent, child, first, reduce=False, count=count)


@COLLECTIVES.register(
    title="Scatter",
    summary="down a binomial tree, each message for a whole subtree",
    source="Thakur et al., 2005",
    cost="⌈lg n⌉α + (n-1)/n Kβ",
    schedule=scatter_schedule,
)
@collective(reads="scatter_list")
def scatter(
    tensor: Tensor, scatter_list: list[Tensor] | None = None, src: int = 0, group: Group = None
) -> None:
    """Send the i-th tensor of rank ``src`` to the i-th rank, as ``dist.scatter`` does.

    The tensors move down the binomial tree of :func:`broadcast`. Each message carries the parts of
    a whole subtree, so a rank sends half of its parts in each round::

        0 ──── 4 5 6 7 ────► 4      round 0
        0 ─ 2 3 ─► 2   4 ─ 6 7 ─► 6

    Cost: ⌈lg n⌉α + (n-1)/n Kβ.

    Args:
        tensor: receives this rank's part; K/n bytes.
        scatter_list: on rank ``src``, one tensor per rank, each like ``tensor``.
        src: the world rank of the root.
        group: the process group; None means the default group.

    Source:
        Thakur, Rabenseifner & Gropp, 2005.
    """
    n, size = dist.get_world_size(group), len(tensor)
    root, parent, children, subtree = tree_neighbors(src, group)
    if parent is None:
        parts = cat([scatter_list[(root + i) % n] for i in range(n)])  # type: ignore[index]
    else:
        parts = recv(tensor.new_empty(subtree * size), parent, group)

    for child, distance in children:
        send(parts[distance * size : 2 * distance * size], child, group)
    tensor.copy_(parts[:size])


def gather_schedule(n: int, root: int = 0) -> Schedule:
    """Yield the rounds of :func:`scatter_schedule` in reverse; chunk i is from rank root + i."""
    for parent, child, first, count in reversed([*_tree(n, root)]):
        yield Round(child, parent, first, reduce=False, count=count)


@COLLECTIVES.register(
    title="Gather",
    summary="up a binomial tree, each message from a whole subtree",
    source="Thakur et al., 2005",
    cost="⌈lg n⌉α + (n-1)/n Kβ",
    schedule=gather_schedule,
)
@collective(reads="tensor")
def gather(
    tensor: Tensor, gather_list: list[Tensor] | None = None, dst: int = 0, group: Group = None
) -> None:
    """Gather the tensors of all ranks on rank ``dst``, as ``dist.gather`` does.

    The tensors move up the tree of :func:`scatter`. Cost: ⌈lg n⌉α + (n-1)/n Kβ.

    Args:
        tensor: this rank's part; K/n bytes.
        gather_list: on rank ``dst``, one tensor per rank, each like ``tensor``.
        dst: the world rank of the root.
        group: the process group; None means the default group.

    Source:
        Thakur, Rabenseifner & Gropp, 2005.
    """
    n, size = dist.get_world_size(group), len(tensor)
    root, parent, children, subtree = tree_neighbors(dst, group)
    parts = tensor.new_empty(subtree * size)
    parts[:size] = tensor

    for child, distance in reversed(children):
        recv(parts[distance * size : 2 * distance * size], child, group)
    if parent is not None:
        send(parts, parent, group)
        return
    for i, part in enumerate(parts.view(n, size)):
        gather_list[(root + i) % n].copy_(part)  # type: ignore[index]


# -- symmetric collectives -------------------------------------------------------------


@COLLECTIVES.register(
    title="All-gather",
    summary="every rank's chunk travels around a ring",
    source="Patarasuk & Yuan, 2009",
    cost="(n-1)α + (n-1)/n Kβ",
    schedule=lambda n: ring_rounds(n, 0, reduce=False),
)
@collective(reads="tensor")
def all_gather(tensor_list: list[Tensor], tensor: Tensor, group: Group = None) -> None:
    """Gather the tensors of all ranks on every rank, as ``dist.all_gather`` does.

    This is the second half of a ring all-reduce: each rank forwards the tensor that it last
    received. Cost: (n-1)α + (n-1)/n Kβ.

    Args:
        tensor_list: receives one tensor per rank, K bytes in total.
        tensor: this rank's part, K/n bytes.
        group: the process group; None means the default group.

    Source:
        Patarasuk & Yuan, 2009.
    """
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    left, right = (rank - 1) % n, (rank + 1) % n

    tensor_list[rank].copy_(tensor)
    for s in range(n - 1):
        out, into = tensor_list[(rank - s) % n], tensor_list[(rank - s - 1) % n]
        exchange(out, right, into, left, group)


@COLLECTIVES.register(
    title="Reduce-scatter",
    summary="chunks are reduced on their way around a ring",
    source="Patarasuk & Yuan, 2009",
    cost="(n-1)α + (n-1)/n Kβ + (n-1)/n Kγ",
    schedule=lambda n: ring_rounds(n, -1, reduce=True),  # rank r gets chunk r
)
@collective(reads="input_list")
def reduce_scatter(
    output: Tensor, input_list: list[Tensor], op: ReduceOp = SUM, group: Group = None
) -> None:
    """Reduce the i-th tensors of all ranks to the i-th rank, as ``dist.reduce_scatter`` does.

    This is the first half of a ring all-reduce, shifted by one chunk: rank r ends with chunk r.
    Cost: (n-1)α + (n-1)/n Kβ + (n-1)/n Kγ.

    Args:
        output: receives the result; K/n bytes.
        input_list: one tensor per rank, each like ``output``, K bytes in total.
        op: SUM, MIN, MAX or PRODUCT.
        group: the process group; None means the default group.

    Source:
        Patarasuk & Yuan, 2009.
    """
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    left, right = (rank - 1) % n, (rank + 1) % n

    partial, recv_buffer = input_list[(rank - 1) % n].clone(), empty_like(output)
    for s in range(n - 1):
        exchange(partial, right, recv_buffer, left, group)
        combine(recv_buffer, input_list[(rank - s - 2) % n], op)
        partial, recv_buffer = recv_buffer, partial
    output.copy_(partial)


def all_to_all_schedule(n: int) -> Schedule:
    """Yield the rounds of a pairwise exchange; rank i sends chunk n·i + j of n² to rank j."""
    r = np.arange(n)
    for s in range(1, n):
        dst = (r + s) % n
        yield Round(r, dst, n * r + dst, reduce=False)


@COLLECTIVES.register(
    title="All-to-all",
    summary="in round s every rank sends to the rank s places to the right",
    source="Thakur et al., 2005",
    cost="(n-1)α + (n-1)/n² Kβ",
    schedule=all_to_all_schedule,
    chunks=lambda n: n * n,
)
@collective(reads="input_tensor_list", uneven=True)
def all_to_all(
    output_tensor_list: list[Tensor], input_tensor_list: list[Tensor], group: Group = None
) -> None:
    """Send the i-th tensor to the i-th rank, like a transpose, as ``dist.all_to_all`` does.

    *Pairwise exchange*: in round s, each rank sends to the rank s places to its right and receives
    from the rank s places to its left. Cost: (n-1)α + (n-1)/n Kβ, where K is the size of one rank's
    tensors; in the catalog's formula, it is the size of all ranks' tensors.

    Args:
        output_tensor_list: receives one tensor from each rank.
        input_tensor_list: one tensor for each rank, K bytes in total; lengths may differ.
        group: the process group; None means the default group.

    Source:
        Thakur, Rabenseifner & Gropp, 2005.
    """
    rank, n = dist.get_rank(group), dist.get_world_size(group)

    output_tensor_list[rank].copy_(input_tensor_list[rank])
    for s in range(1, n):
        dst, src = (rank + s) % n, (rank - s) % n
        exchange(input_tensor_list[dst], dst, output_tensor_list[src], src, group)


def barrier_schedule(n: int) -> Schedule:
    """Yield the rounds: after k of them, each rank knows that 2^k ranks have arrived."""
    r = np.arange(n)
    for bit in bits(n):
        yield Round(r, (r + bit) % n, np.zeros_like(r), reduce=True)


@COLLECTIVES.register(
    title="Barrier",
    summary="every rank notifies the ranks at distance 1, 2, 4, … in turn",
    source="Hensgen, Finkel & Manber, 1988",
    cost="⌈lg n⌉α",
    schedule=barrier_schedule,
    chunks=one_chunk,
)
@collective()
def barrier(group: Group = None) -> None:
    """Return when every rank has arrived, as ``dist.barrier`` does.

    *Dissemination*: in round k, each rank notifies the rank 2^k places to its right, which doubles
    the number of ranks that are known to have arrived::

        r ──► r+1,  r ──► r+2,  r ──► r+4, …

    Cost: ⌈lg n⌉α, with empty messages.

    Args:
        group: the process group; None means the default group.

    Source:
        Hensgen, Finkel & Manber, "Two algorithms for barrier synchronization", 1988.
    """
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    token = empty(0)

    for bit in bits(n):
        exchange(token, (rank + bit) % n, token, (rank - bit) % n, group)


# -- collectives with gradients ----------------------------------------------------------


class _Copy(autograd.Function):
    """The identity in forward; backward sums the gradients of all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return sum_of_ranks(gradient, ctx.group), None


class _Sum(autograd.Function):
    """The sum of all ranks' tensors in forward; backward passes the gradient unchanged."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        total = x.clone(memory_format=contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


copy_to_ranks = cast(Callable[[Tensor, Group], Tensor], _Copy.apply)
sum_of_ranks = cast(Callable[[Tensor, Group], Tensor], _Sum.apply)
