"""Groups that are not made by all, or not used by their members."""

from __future__ import annotations

import torch.distributed as dist

from benchmarks.bugs.catalogue import bug, ones, rank
from distkit.diagnosis.findings import Kind

GROUP, MADE = Kind.WRONG_GROUP, Kind.NEW_GROUP


@bug(MADE, (0, 1, 2, 3), "every rank", "pytorch/pytorch#130102", ranks=4)
def each_node_makes_its_own_group() -> None:
    """Each half of the world makes a group of itself only."""
    mine = [0, 1] if rank() < 2 else [2, 3]
    group = dist.new_group(mine)  # <-
    dist.all_reduce(ones(1), group=group)


@bug(MADE, (2,), "every rank", "pytorch/pytorch#81291")
def only_members_make_the_group() -> None:
    """The group is made inside `if rank in members`; then all go on."""
    members = [0, 1]
    if rank() in members:
        dist.new_group(members)  # <-
    dist.barrier()  # <-


@bug(MADE, (0,), "same ranks", "distdl/distdl#87")
def groups_in_another_order() -> None:
    """Rank 0 makes the two groups in the other order."""
    pairs = [[0, 1], [1, 2]]
    for pair in reversed(pairs) if rank() == 0 else pairs:
        dist.new_group(pair)  # <-


@bug(Kind.RAISED, (1, 2), "group_src", "meta-pytorch/torchrec#4601", how="fails")
def a_group_rank_as_source() -> None:
    """The source is given as a rank of the group, and torch wants a global one."""
    group = dist.new_group([1, 2])
    if rank() != 0:
        dist.broadcast(ones(2), src=0, group=group)  # <-


@bug(GROUP, (0,), "members", "pytorch/pytorch#67600", how="finishes")
def broadcast_in_a_group_of_others() -> None:
    """Rank 0 broadcasts in a group that it does not belong to: nothing happens."""
    group = dist.new_group([1, 2])
    if rank() == 0:
        dist.broadcast(ones(2), src=1, group=group)  # <-


@bug((GROUP, Kind.CYCLE), (0, 1), "same", "pytorch/pytorch#172668", ranks=2)
def two_groups_in_another_order() -> None:
    """Tensor and data parallel groups are the same two ranks, used in opposite orders."""
    tp, dp = dist.new_group([0, 1]), dist.new_group([0, 1])
    first, second = (tp, dp) if rank() == 0 else (dp, tp)
    dist.all_reduce(ones(2), group=first)  # <-
    dist.all_reduce(ones(2), group=second)


@bug(GROUP, (2,), "member", "NVIDIA/Megatron-LM#3401")
def the_last_stage_forgets_the_tied_weights() -> None:
    """The first and the last stage share an embedding; the last forgets to reduce it."""
    ends = dist.new_group([0, 2])
    if rank() == 0:
        dist.all_reduce(ones(4), group=ends)  # <-


@bug(GROUP, (1,), "same group")
def a_barrier_of_the_wrong_group() -> None:
    """Rank 1 waits for its pair, the others for all."""
    pair = dist.new_group([0, 1])
    if rank() == 1:
        dist.barrier(group=pair)  # <-
    else:
        dist.barrier()  # <-


@bug((Kind.SKIPPED, GROUP), (0, 1), "group=", "NVIDIA/Megatron-LM#1707", ranks=5)
def the_group_is_forgotten() -> None:
    """The tensor parallel ranks forget `group=`: the reduction waits for the whole world."""
    tp = dist.new_group([0, 1])
    if rank() in dist.get_process_group_ranks(tp):
        dist.all_reduce(ones(4))  # <-


@bug((Kind.SKIPPED, Kind.UNEVEN), (0,), ("`if",))
def a_group_is_left_too_early() -> None:
    """Rank 0 thinks that all is done, and leaves before the last reduction."""
    for step in range(3):
        if rank() == 0 and step == 2:
            return
        dist.all_reduce(ones(4))  # <-
