"""Collectives that only some ranks come to: saving, evaluating, logging on rank 0."""

from __future__ import annotations

import torch
import torch.distributed as dist

from benchmarks.bugs.catalogue import bug, ddp, ones, rank, rows
from distkit.diagnosis.findings import Kind

IF = "`if"
ONLY = (Kind.DIFFERENT_COLLECTIVE, Kind.SKIPPED, Kind.MISSING_BARRIER, Kind.UNEVEN)


@bug(ONLY, (0,), IF, "alan-turing-institute/autocast#386")
def saving_has_a_barrier_inside() -> None:
    """Rank 0 saves, and the function that saves has a barrier; all end with another one."""

    def save() -> None:
        dist.barrier()  # <-

    dist.all_reduce(ones(4))
    if rank() == 0:
        save()
    dist.barrier()


@bug(ONLY, (0,), IF, "pytorch/pytorch#73383")
def full_state_on_rank_0() -> None:
    """Rank 0 gathers the sharded weights to save them; the others take the next step."""
    shard = ones(4)
    for step in range(3):
        dist.all_reduce(ones(8))
        if rank() == 0 and step == 1:
            dist.all_gather(rows(shard), shard)  # <-


@bug(ONLY, (0,), IF, "pytorch/pytorch#148756")
def full_tensor_on_rank_0() -> None:
    """Rank 0 asks for the full tensor of a sharded parameter; then all meet."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    weight = distribute_tensor(ones(6, 2), mesh, [Shard(0)])
    if rank() == 0:
        weight.full_tensor()  # <-
    dist.barrier()


@bug(ONLY, (0,), IF, "huggingface/accelerate#2785")
def gathering_metrics_on_rank_0() -> None:
    """Predictions are gathered inside `if rank == 0`, at the end of the program."""
    prediction = ones(4)
    if rank() == 0:
        dist.all_gather(rows(prediction), prediction)  # <-


@bug(ONLY, (0,), IF, "huggingface/accelerate#2733")
def gathering_objects_on_rank_0() -> None:
    """gather_object is called where its result is wanted."""
    dist.all_reduce(ones(1))
    if rank() == 0:
        dist.gather_object({"text": "…"}, [None] * 3, dst=0)  # <-
    dist.barrier()


@bug(ONLY, (0,), IF, "dvl-tum/center-group#2")
def logging_reduces_on_rank_0() -> None:
    """Rank 0 logs a metric, which reduces it over the ranks, between two steps of DDP."""
    net = ddp()
    for _ in range(2):
        loss = net(ones(2, 4)).sum()
        loss.backward()
        if rank() == 0:
            dist.all_reduce(loss.detach())  # <-


@bug(ONLY, (0,), IF, "Lightning-AI/pytorch-lightning#18148")
def the_log_folder_is_broadcast() -> None:
    """Asking for the log folder broadcasts its name; only rank 0 asks."""
    net = ddp()
    if rank() == 0:
        dist.broadcast_object_list(["logs/3"], src=0)  # <-
    for _ in range(2):
        net(ones(2, 4)).sum().backward()


@bug((Kind.UNEVEN, Kind.SKIPPED), (2,), "same", "Lightning-AI/pytorch-lightning#19106")
def metrics_with_other_keys() -> None:
    """Rank 2 has one metric more to reduce."""
    metrics = {"loss": ones(1), "accuracy": ones(1)}
    if rank() == 2:
        metrics["rare class"] = ones(1)
    for value in metrics.values():
        dist.all_reduce(value)  # <-
    dist.barrier()  # <-


@bug(ONLY, (0,), IF, "pytorch/pytorch#54059")
def validation_on_rank_0_through_ddp() -> None:
    """Rank 0 validates with the wrapped model, whose forward broadcasts its buffers."""
    net = ddp(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8)))
    for _ in range(2):
        net(ones(2, 4)).sum().backward()
        if rank() == 0:
            net(ones(2, 4))  # <-
    dist.barrier()


@bug(ONLY, (0,), IF, "EleutherAI/bergson#380")
def optimizer_state_on_rank_0() -> None:
    """Rank 0 collects the optimizer's shards with reduce, the others go on to a barrier."""
    if rank() == 0:
        dist.reduce(ones(8), dst=0)  # <-
    dist.barrier()


@bug((Kind.UNEVEN, Kind.SKIPPED, Kind.DIFFERENT_COLLECTIVE), (0,), "same")
def rank_0_has_more_weights() -> None:
    """Rank 0 loaded a checkpoint with one tensor more; all are broadcast one by one."""
    weights = [ones(4)] * (4 if rank() == 0 else 3)
    for w in weights:
        dist.broadcast(w, src=0)  # <-
    for _ in range(2):
        dist.all_reduce(ones(4))


@bug(Kind.RAISED, (0,), "disk", "OpenRLHF/OpenRLHF#1126", how="fails")
def the_disk_is_full() -> None:
    """Rank 0 cannot save, and the others wait for it at a barrier."""
    if rank() == 0:
        raise OSError("no space left on the disk")  # <-
    dist.barrier()  # <-


@bug(ONLY, (0,), IF, "huggingface/trl#296")
def statistics_reduced_on_rank_0() -> None:
    """Rank 0 reduces statistics inside `if is_main_process`, then all gather."""
    stats, x = ones(1), ones(1)
    for _ in range(2):
        dist.all_gather(rows(x), x)
        if rank() == 0:
            dist.all_reduce(stats)  # <-


@bug(ONLY, (2,), IF, "bo-ke/llm-internal-medicine#45")
def nothing_to_report() -> None:
    """Rank 2 has no metrics, and returns before they are gathered."""
    metrics = {} if rank() == 2 else {"norm": 1.0}
    if metrics:
        dist.all_gather_object([None] * 3, metrics)  # <-


@bug(ONLY, (0,), IF, "Lightning-AI/pytorch-lightning#16417")
def a_callback_on_rank_0_with_a_barrier() -> None:
    """A callback that runs on rank 0 only waits for all ranks, in every epoch."""
    for _ in range(2):
        dist.all_reduce(ones(4))
        if rank() == 0:
            dist.barrier()  # <-


@bug((Kind.DIFFERENT_COLLECTIVE,), (0,), "same", "Lightning-AI/pytorch-lightning#19045")
def best_model_decided_on_rank_0() -> None:
    """Rank 0 thinks that this is the best model and broadcasts a file name; the others train."""
    net = ddp()
    for step in range(2):
        if rank() == 0 and step == 1:
            dist.broadcast_object_list(["best.pt"], src=0)  # <-
        net(ones(2, 4)).sum().backward()


@bug((Kind.DIFFERENT_COLLECTIVE,), (1,), "same", "speechbrain/speechbrain#2401")
def a_checkpoint_by_the_clock() -> None:
    """Rank 1's clock says that it is time to save: it broadcasts, the others send gradients."""
    net = ddp()
    for step in range(3):
        net(ones(2, 4)).sum().backward()
        if rank() == 1 and step == 1:
            dist.broadcast(ones(1), src=0)  # <-


@bug(ONLY, (0,), IF, "instructlab/training#566")
def all_but_rank_0_wait() -> None:
    """The other ranks wait until rank 0 has downloaded; rank 0 does not come to a barrier."""
    if rank() != 0:
        dist.barrier()  # <-
    dist.all_reduce(ones(2))


@bug(ONLY, (0,), IF, "speechbrain/speechbrain#2051")
def the_last_evaluation() -> None:
    """Rank 0 alone evaluates at the end, which reduces twice."""
    dist.all_reduce(ones(4))
    if rank() == 0:
        for _ in range(2):
            dist.all_reduce(ones(2))  # <-


@bug(ONLY, (0,), IF, "NVIDIA/Megatron-LM#1707", ranks=4)
def differences_gathered_where_there_are_some() -> None:
    """The ranks that found a difference gather it; only rank 0 did."""
    difference = {"key": 1} if rank() == 0 else None
    if difference:
        dist.gather_object(difference, [None] * 4, dst=0)  # <-
    dist.all_reduce(ones(1))
