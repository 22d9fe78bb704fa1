"""Members of a collective that call different ones, or bring tensors that do not fit."""

from __future__ import annotations

import torch
import torch.distributed as dist

from benchmarks.bugs.catalogue import bug, ddp, ones, rank, rows
from distkit.diagnosis.findings import Kind

TENSOR, CALL = Kind.DIFFERENT_TENSOR, Kind.DIFFERENT_COLLECTIVE
SAME = "same shape"


@bug(TENSOR, (0, 1), (SAME, "[100, 8]"), "NVIDIA/nccl#1394", ranks=2)
def reduced_in_two_shapes() -> None:
    """Rank 0 reduces half of the rows."""
    x = ones(100 if rank() == 0 else 200, 8)
    dist.all_reduce(x)  # <-


@bug(TENSOR, (2,), (SAME, "[15]"), "NVIDIA/Megatron-LM#3401")
def one_layer_more_is_tracked() -> None:
    """Rank 2 tracks the loss of one layer more than the others."""
    values = ones(15 if rank() == 2 else 14)
    for _ in range(2):
        dist.all_reduce(values)  # <-


@bug(TENSOR, (1,), (SAME, "[262144]"), "pytorch/pytorch#140563")
def a_large_tensor_meets_a_small_one() -> None:
    """Rank 1 reduces its flat gradients where the others reduce a metric."""
    flat, metric = ones(262144), ones(1025)
    x = flat if rank() == 1 else metric
    dist.all_reduce(x)  # <-


@bug(TENSOR, (1,), (SAME, "float16"))
def half_precision_on_one_rank() -> None:
    """Rank 1 came out of autocast in half precision."""
    x = ones(8, dtype=torch.float16 if rank() == 1 else torch.float32)
    dist.all_reduce(x)  # <-


@bug(TENSOR, (0,), (SAME, "float64"))
def double_precision_is_gathered() -> None:
    """Rank 0 computed its metric with numpy, in double precision."""
    x = ones(4, dtype=torch.float64 if rank() == 0 else torch.float32)
    dist.all_gather(rows(x), x)  # <-


@bug(TENSOR, (0, 1), (SAME, "[3, 4]"), ranks=2)
def uneven_shards_are_gathered() -> None:
    """Seven rows over two ranks make shards of four and of three."""
    shard, n = ones(4 if rank() == 0 else 3, 4), dist.get_world_size()
    dist.all_gather_into_tensor(ones(n * len(shard), 4), shard)  # <-


@bug(TENSOR, (2,), SAME)
def reduce_scatter_of_two_sizes() -> None:
    """Rank 2 padded its gradients, the others did not."""
    chunk = 4 if rank() == 2 else 3
    dist.reduce_scatter(ones(chunk), [ones(chunk)] * 3)  # <-


@bug(TENSOR, (0,), (SAME, "[11, 4]"))
def resized_embedding_on_rank_0() -> None:
    """Rank 0 added a token to the vocabulary before the weights are broadcast."""
    embedding = ones(11 if rank() == 0 else 10, 4)
    dist.broadcast(embedding, src=0)  # <-


@bug(TENSOR, (1,), SAME)
def gathered_in_two_sizes() -> None:
    """Rank 1 sends more predictions than rank 0 has room for."""
    x = ones(6 if rank() == 1 else 4)
    dist.gather(x, rows(x) if rank() == 0 else None, dst=0)  # <-


@bug(TENSOR, (2,), SAME)
def scattered_into_a_small_buffer() -> None:
    """Rank 2's buffer is smaller than its share."""
    x = torch.zeros(3 if rank() == 2 else 4)
    dist.scatter(x, [ones(4)] * 3 if rank() == 0 else None, src=0)  # <-


@bug((TENSOR, CALL), (1,), "same", "meta-pytorch/torchrec#4132")
def reduce_for_all_reduce() -> None:
    """Rank 1 calls reduce where the others call all_reduce."""
    x = ones(64)
    if rank() == 1:
        dist.reduce(x, dst=0)  # <-
    else:
        dist.all_reduce(x)  # <-


@bug(CALL, (0,), "same", "NVIDIA/nccl#531")
def reduce_scatter_for_all_gather() -> None:
    """Rank 0 scatters its gradients while the others gather weights."""
    x = ones(512)
    if rank() == 0:
        dist.reduce_scatter_tensor(ones(512), ones(3 * 512))  # <-
    else:
        dist.all_gather_into_tensor(ones(3 * 512), x)  # <-


@bug(CALL, (2,), "same")
def all_gather_for_all_reduce() -> None:
    """Rank 2 gathers the losses, the others reduce them."""
    loss = ones(1)
    if rank() == 2:
        dist.all_gather(rows(loss), loss)  # <-
    else:
        dist.all_reduce(loss)  # <-


@bug(CALL, (1,), "same")
def objects_for_tensors() -> None:
    """Rank 1 gathers objects where the others gather tensors."""
    x = ones(2)
    if rank() == 1:
        dist.all_gather_object([None] * 3, x)  # <-
    else:
        dist.all_gather(rows(x), x)  # <-


@bug(CALL, (0,), "same", "speechbrain/speechbrain#2401")
def broadcast_into_backward() -> None:
    """Rank 0 broadcasts a flag while the others send their gradients."""
    net = ddp()
    net(ones(2, 4)).sum().backward()
    if rank() == 0:
        dist.broadcast(ones(1), src=0)  # <-
    net(ones(2, 4)).sum().backward()


@bug(Kind.DIFFERENT_ROOT, (2,), "same destination")
def reduced_to_another_root() -> None:
    """Rank 2 thinks that the last rank is the root."""
    dist.reduce(ones(4), dst=2 if rank() == 2 else 0)  # <-


@bug(Kind.DIFFERENT_ROOT, (0, 1, 2), "same destination")
def everybody_gathers_to_itself() -> None:
    """Each rank names itself as the destination."""
    x = ones(4)
    dist.gather(x, rows(x), dst=rank())  # <-


@bug(TENSOR, (0, 1), "same shape", "deepspeedai/DeepSpeed#6809", ranks=2)
def capacities_differ() -> None:
    """Each rank computed another capacity for its experts; the buffers are exchanged evenly."""
    capacity = 3 if rank() == 0 else 4
    x = ones(2 * capacity, 8)
    dist.all_to_all_single(torch.empty_like(x), x)  # <-


@bug((TENSOR, Kind.ANOTHER_ORDER), (2,), ("order", "same"), "pytorch/pytorch#75902")
def layers_in_another_order() -> None:
    """Rank 2 goes through its layers backwards."""
    layers = [ones(6), ones(2), ones(4)]
    for layer in reversed(layers) if rank() == 2 else layers:
        dist.all_reduce(layer)  # <-


@bug(Kind.DIFFERENT_REDUCTION, (1,), "same reduction", how="finishes")
def maximum_for_sum() -> None:
    """Rank 1 takes the maximum of the norms, the others their sum."""
    op = dist.ReduceOp.MAX if rank() == 1 else dist.ReduceOp.SUM
    dist.all_reduce(ones(1), op=op)  # <-
