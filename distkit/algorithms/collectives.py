"""The pages: collective operations as one rank's program, in ``torch.distributed`` words.

Each has the contract of ``torch.distributed``'s own call, so that one can be passed for the
other; :mod:`~distkit.algorithms.contract` sees to that.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor, cat, empty, empty_like
from torch.distributed.distributed_c10d import _get_default_group

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
from distkit.algorithms.rounds import highest_bit, lowest_bit


@collective()
def ring_all_reduce(x: Tensor, op: ReduceOp = SUM, group: Group = None) -> None:
    """Reduce ``x`` over all ranks, in place. The contract of ``dist.all_reduce(x)``.

    In n-1 rounds of *reduce-scatter* each rank passes a chunk on to its right neighbour and
    adds what comes from the left: then rank r holds the complete sum of chunk r+1. In n-1
    rounds of *all-gather* the complete chunks go round once more::

        rank 0 ── chunk r-s ──► rank 1 ──► … ──► rank n-1 ──► rank 0

    2(n-1)α + 2(n-1)/n Kβ + (n-1)/n Kγ: no algorithm sends fewer bytes.

    Args:
        x: tensor of any shape, the same on every rank; K bytes.
        op: SUM, AVG, MIN, MAX or PRODUCT.
        group: the process group; None is the world.

    Source:
        Patarasuk & Yuan, 2009; brought to deep learning by Gibiansky (Baidu), 2017.

    Example:
        >>> import distkit as dk, torch
        >>> def total():
        ...     x = torch.arange(6.)
        ...     dk.algorithms.ring_all_reduce(x)
        ...     return x.tolist()
        >>> dk.run_ranks(total, 3).results[0]        # doctest: +SKIP
        [0.0, 3.0, 6.0, 9.0, 12.0, 15.0]
    """
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    left, right = (rank - 1) % n, (rank + 1) % n
    chunks = x.tensor_split(n)  # views: writing a chunk writes x
    inbox = empty_like(chunks[0])

    for s in range(n - 1):  # reduce-scatter
        out, mine = chunks[(rank - s) % n], chunks[(rank - s - 1) % n]
        combine(mine, exchange(out, right, inbox[: len(mine)], left, group), op)

    for s in range(n - 1):  # all-gather
        out, into = chunks[(rank + 1 - s) % n], chunks[(rank - s) % n]
        exchange(out, right, into, left, group)


# -- one to all, all to one ------------------------------------------------------------


def root_and_place(root: int, group: Group) -> tuple[int, int]:
    """A root's rank in the group, and this rank's place when counting begins at the root."""
    n = dist.get_world_size(group)
    start = dist.get_group_rank(group or _get_default_group(), root)
    return start, (dist.get_rank(group) - start) % n


@collective()
def broadcast(tensor: Tensor, src: int = 0, group: Group = None) -> None:
    """Give every rank the tensor of rank ``src``. The contract of ``dist.broadcast``.

    A *binomial tree*: in each round whoever has it sends it on, so that their number doubles::

        0 ─────────────► 4          round 0
        0 ─────► 2       4 ─────► 6
        0 ► 1    2 ► 3   4 ► 5    6 ► 7

    ⌈lg n⌉(α + Kβ): no algorithm takes fewer rounds.

    Args:
        tensor: of any shape, the same on every rank; K bytes.
        src: the root's rank in the world.
        group: the process group; None is the world.

    Source:
        Thakur, Rabenseifner & Gropp, "Optimization of collective communication operations in
        MPICH", 2005.
    """
    n = dist.get_world_size(group)
    root, place = root_and_place(src, group)
    low = lowest_bit(place) if place else highest_bit(2 * n - 1)

    if place:
        recv(tensor, (root + place - low) % n, group)
    while low := low // 2:
        if place + low < n:
            send(tensor, (root + place + low) % n, group)


@collective()
def reduce(tensor: Tensor, dst: int = 0, op: ReduceOp = SUM, group: Group = None) -> None:
    """Reduce to rank ``dst``; the other tensors stay as they are. As ``dist.reduce``.

    The binomial tree of :func:`broadcast`, from the leaves to the root.
    ⌈lg n⌉(α + Kβ + Kγ).

    Args:
        tensor: of any shape, the same on every rank; K bytes.
        dst: the root's rank in the world.
        op: SUM, AVG, MIN, MAX or PRODUCT.
        group: the process group; None is the world.

    Source:
        Thakur, Rabenseifner & Gropp, 2005.
    """
    n = dist.get_world_size(group)
    root, place = root_and_place(dst, group)
    partial, inbox = tensor if place == 0 else tensor.clone(), empty_like(tensor)

    low = 1
    while low < n and not place & low:
        if place + low < n:
            combine(partial, recv(inbox, (root + place + low) % n, group), op)
        low *= 2
    if place:
        send(partial, (root + place - low) % n, group)


@collective(reads="scatter_list")
def scatter(
    tensor: Tensor, scatter_list: list[Tensor] | None = None, src: int = 0, group: Group = None
) -> None:
    """Give the i-th rank the i-th tensor of rank ``src``. The contract of ``dist.scatter``.

    Down the binomial tree of :func:`broadcast`: each message carries the parts of a whole
    subtree, so that everybody has sent half of what it got after each round::

        0 ──── 4 5 6 7 ────► 4      round 0
        0 ─ 2 3 ─► 2   4 ─ 6 7 ─► 6

    ⌈lg n⌉α + (n-1)/n Kβ.

    Args:
        tensor: receives the part; K/n bytes.
        scatter_list: on rank ``src`` one tensor per rank, each like ``tensor``.
        src: the root's rank in the world.
        group: the process group; None is the world.

    Source:
        Thakur, Rabenseifner & Gropp, 2005.
    """
    n, size = dist.get_world_size(group), len(tensor)
    root, place = root_and_place(src, group)
    low = lowest_bit(place) if place else highest_bit(2 * n - 1)

    if place:
        parts = recv(tensor.new_empty(min(low, n - place) * size), (root + place - low) % n, group)
    else:
        parts = cat([scatter_list[(root + i) % n] for i in range(n)])  # type: ignore[index]
    while low := low // 2:
        if place + low < n:
            send(parts[low * size : 2 * low * size], (root + place + low) % n, group)
    tensor.copy_(parts[:size])


@collective(reads="tensor")
def gather(
    tensor: Tensor, gather_list: list[Tensor] | None = None, dst: int = 0, group: Group = None
) -> None:
    """Bring everybody's tensor to rank ``dst``. The contract of ``dist.gather``.

    Up the tree of :func:`scatter`. ⌈lg n⌉α + (n-1)/n Kβ.

    Args:
        tensor: this rank's part; K/n bytes.
        gather_list: on rank ``dst`` one tensor per rank, each like ``tensor``.
        dst: the root's rank in the world.
        group: the process group; None is the world.

    Source:
        Thakur, Rabenseifner & Gropp, 2005.
    """
    n, size = dist.get_world_size(group), len(tensor)
    root, place = root_and_place(dst, group)
    low = lowest_bit(place) if place else highest_bit(2 * n - 1)
    parts = tensor.new_empty(min(low, n - place) * size)
    parts[:size] = tensor

    step = 1
    while step < low:
        if place + step < n:
            recv(parts[step * size : 2 * step * size], (root + place + step) % n, group)
        step *= 2
    if place:
        send(parts, (root + place - low) % n, group)
    elif gather_list is not None:
        for i, part in enumerate(parts.split(size) if size else ()):
            gather_list[(root + i) % n].copy_(part)


# -- all to all ------------------------------------------------------------------------


@collective(reads="tensor")
def all_gather(tensor_list: list[Tensor], tensor: Tensor, group: Group = None) -> None:
    """Give everybody everybody's tensor. The contract of ``dist.all_gather``.

    The second half of :func:`ring_all_reduce`: each rank passes on what came last.
    (n-1)α + (n-1)/n Kβ.

    Args:
        tensor_list: receives one tensor per rank; K bytes together.
        tensor: this rank's part, K/n bytes.
        group: the process group; None is the world.

    Source:
        Patarasuk & Yuan, 2009.
    """
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    left, right = (rank - 1) % n, (rank + 1) % n

    tensor_list[rank].copy_(tensor)
    for s in range(n - 1):
        out, into = tensor_list[(rank - s) % n], tensor_list[(rank - s - 1) % n]
        exchange(out, right, into, left, group)


@collective(reads="input_list")
def reduce_scatter(
    output: Tensor, input_list: list[Tensor], op: ReduceOp = SUM, group: Group = None
) -> None:
    """Give the i-th rank the reduction of all i-th tensors. As ``dist.reduce_scatter``.

    The first half of :func:`ring_all_reduce`, begun one chunk earlier so that rank r ends
    with chunk r. (n-1)α + (n-1)/n Kβ + (n-1)/n Kγ.

    Args:
        output: receives the result; K/n bytes.
        input_list: one tensor per rank, each like ``output``; K bytes together.
        op: SUM, AVG, MIN, MAX or PRODUCT.
        group: the process group; None is the world.

    Source:
        Patarasuk & Yuan, 2009.
    """
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    left, right = (rank - 1) % n, (rank + 1) % n

    partial, inbox = input_list[(rank - 1) % n].clone(), empty_like(output)
    for s in range(n - 1):
        exchange(partial, right, inbox, left, group)
        combine(inbox, input_list[(rank - s - 2) % n], op)
        partial, inbox = inbox, partial
    output.copy_(partial)


@collective(reads="input_tensor_list", uneven=True)
def all_to_all(
    output_tensor_list: list[Tensor], input_tensor_list: list[Tensor], group: Group = None
) -> None:
    """Send the i-th tensor to the i-th rank: a transpose. As ``dist.all_to_all``.

    *Pairwise exchange*: in round s each rank sends to the rank s to its right and receives
    from the rank s to its left. (n-1)α + (n-1)/n Kβ.

    Args:
        output_tensor_list: receives one tensor from each rank.
        input_tensor_list: one tensor for each rank, K bytes together; lengths may differ.
        group: the process group; None is the world.

    Source:
        Thakur, Rabenseifner & Gropp, 2005.
    """
    rank, n = dist.get_rank(group), dist.get_world_size(group)

    output_tensor_list[rank].copy_(input_tensor_list[rank])
    for s in range(1, n):
        to, source = (rank + s) % n, (rank - s) % n
        exchange(input_tensor_list[to], to, output_tensor_list[source], source, group)


@collective()
def barrier(group: Group = None) -> None:
    """Return when every rank has come. The contract of ``dist.barrier``.

    *Dissemination*: in round k each rank tells the one 2^k to its right all that it knows; those
    who are known to have come double in number::

        r ──► r+1,  r ──► r+2,  r ──► r+4, …

    ⌈lg n⌉α, with empty messages.

    Args:
        group: the process group; None is the world.

    Source:
        Hensgen, Finkel & Manber, "Two algorithms for barrier synchronization", 1988.
    """
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    nothing = empty(0)

    step = 1
    while step < n:
        exchange(nothing, (rank + step) % n, nothing, (rank - step) % n, group)
        step *= 2
