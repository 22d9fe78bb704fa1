"""Ranks that do not have the same number of batches, or leave their loop at different times."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from benchmarks.bugs.catalogue import bug, ddp, ones, rank, rows
from distkit.diagnosis.findings import Kind

EVEN = "same number of"


@bug(Kind.UNEVEN, (1,), (EVEN, "batches"), "pytorch/pytorch#38174")
def ddp_uneven_batches() -> None:
    """Rank 1 has one batch more, and then there is a barrier."""
    net = ddp()
    for _ in range(4 if rank() == 1 else 3):
        net(ones(2, 4)).sum().backward()  # <-
    dist.barrier()  # <-


@bug(Kind.UNEVEN, (0,), (EVEN, "batches"), "QwenAudio/CosyVoice#297")
def ddp_fewer_batches_then_metric() -> None:
    """Rank 0 has one batch less, and reduces its metric while the others still train."""
    net, loss = ddp(), ones(1)
    for _ in range(2 if rank() == 0 else 3):
        net(ones(2, 4)).sum().backward()  # <-
    dist.all_reduce(loss)  # <-


@bug(Kind.UNEVEN, (2,), (EVEN, "batches"), "Lightning-AI/pytorch-lightning#20404")
def no_data_for_a_rank() -> None:
    """Rank 2 has no shard, and returns before it trains."""
    net, batches = ddp(), [] if rank() == 2 else [ones(2, 4)] * 2
    if not batches:
        return
    for x in batches:
        net(x).sum().backward()  # <-


@bug(Kind.UNEVEN, (1,), (EVEN, "batches"), "microsoft/PyMarlin#80")
def ddp_one_batch_more_and_the_end() -> None:
    """Rank 1 has one batch more, and nothing comes after the loop."""
    net = ddp()
    for _ in range(3 if rank() == 1 else 2):
        net(ones(2, 4)).sum().backward()  # <-


@bug(Kind.UNEVEN, (0,), "break", "huggingface/trl#254")
def early_stopping_on_one_rank() -> None:
    """Rank 0 finds that its own divergence is too large, and leaves the loop."""
    net = ddp()
    for step in range(4):
        divergence = 2.0 if rank() == 0 and step == 2 else 0.1
        if divergence > 1.5:
            break
        net(ones(2, 4)).sum().backward()  # <-
    dist.barrier()  # <-


@bug(Kind.UNEVEN, (0,), "break", "OpenNMT/OpenNMT-py#1389")
def early_stopping_known_to_rank_0() -> None:
    """Only rank 0 knows the validation score, and stops."""
    patience = 3
    for _ in range(5):
        dist.all_reduce(ones(10))  # <-
        patience -= rank() == 0
        if patience == 0:
            break
    dist.broadcast(ones(4), src=0)  # <-


@bug(Kind.UNEVEN, (1,), "continue", "OpenBMB/BMTrain#108")
def nan_skips_a_step() -> None:
    """The loss of rank 1 is NaN once, and it goes on to the next batch."""
    net = ddp()
    for step in range(3):
        loss = net(ones(2, 4)).sum()
        if rank() == 1 and step == 1:
            loss = loss * torch.nan
        if torch.isnan(loss):
            continue
        loss.backward()  # <-


@bug((Kind.UNEVEN, Kind.SKIPPED), (1,), "continue", "pytorch/audio#3749")
def nan_returns_before_the_gather() -> None:
    """Rank 1 returns from its step before the number of frames is gathered."""
    for step in range(3):
        loss = torch.tensor(torch.nan if rank() == 1 and step == 2 else 1.0)
        if loss.isnan():
            continue
        frames = ones(1)
        dist.all_gather(rows(frames), frames)  # <-


@bug(Kind.UNEVEN, (2,), "continue", "pytorch/pytorch#44353")
def out_of_memory_skips_a_batch() -> None:
    """Rank 2 runs out of memory in forward, says so and goes on; a metric follows each epoch."""
    net, losses = ddp(), ones(1)
    for step in range(3):
        try:
            if rank() == 2 and step == 1:
                raise MemoryError("out of memory")
            loss = net(ones(2, 4)).sum()
        except MemoryError:
            continue
        loss.backward()  # <-
    dist.all_reduce(losses)  # <-


@bug(Kind.UNEVEN, (1,), "continue", "facebookresearch/fairseq#708")
def out_of_memory_skips_a_plain_step() -> None:
    """Rank 1 runs out of memory; the gradients are reduced by hand."""
    for step in range(3):
        grads = [ones(4), ones(2)]
        try:
            if rank() == 1 and step == 2:
                raise MemoryError("out of memory")
        except MemoryError:
            continue
        for g in grads:
            dist.all_reduce(g)  # <-
    dist.barrier()  # <-


@bug((Kind.DIFFERENT_COLLECTIVE, Kind.SKIPPED), (2,), "`if", "bghira/SimpleTuner#3099")
def a_data_set_that_begins_later() -> None:
    """Rank 2's next batch comes from a data set that exchanges its state before it begins."""
    for step in range(3):
        if rank() == 2 and step == 1:
            dist.all_gather_object([None] * 3, {"start": step})  # <-
        dist.all_reduce(ones(8))


@bug((Kind.DIFFERENT_TENSOR,), (2,), ("same shape", "last batch"), "criteo/tf-yarn#79")
def last_batch_is_smaller() -> None:
    """The last batch of rank 2 is smaller, and predictions are gathered."""
    for size in (8, 8, 5 if rank() == 2 else 8):
        prediction = ones(size, 2)
        dist.all_gather(rows(prediction), prediction)  # <-


@bug(Kind.UNEVEN, (1,), "continue", "NVIDIA-NeMo/Automodel#2468")
def last_micro_batch_is_skipped() -> None:
    """Rank 1 skips the micro-batch whose backward would have sent the gradients."""
    net = ddp()
    for micro in range(4):
        if rank() == 1 and micro == 3:
            continue
        if micro % 2 == 0:
            with net.no_sync():
                net(ones(2, 4)).sum().backward()
        else:
            net(ones(2, 4)).sum().backward()  # <-
    dist.barrier()  # <-


@bug(Kind.UNEVEN, (0,), ("no_sync", EVEN), "huggingface/picotron#5")
def accumulation_differs_by_rank() -> None:
    """Rank 0 accumulates over two batches, the others send the gradients of each."""
    net, accumulate = ddp(), 2 if rank() == 0 else 1
    for step in range(4):
        if (step + 1) % accumulate:
            with net.no_sync():
                net(ones(2, 4)).sum().backward()
        else:
            net(ones(2, 4)).sum().backward()  # <-
    dist.all_reduce(ones(1))  # <-


@bug(Kind.UNEVEN, (2,), "break")
def the_clock_ends_the_loop() -> None:
    """Each rank looks at its own clock; rank 2 is slow and stops earlier."""
    started, budget = time.monotonic(), 10.0
    for step in range(6):
        late = 100.0 if rank() == 2 and step == 4 else 0.0
        if time.monotonic() + late - started > budget:
            break
        dist.all_reduce(ones(16))  # <-
    dist.barrier()  # <-


@bug(Kind.RAISED, (1,), "StopIteration", how="fails")
def an_iterator_ends() -> None:
    """Rank 1's iterator has no third batch."""
    batches = iter([ones(3)] * (2 if rank() == 1 else 3))
    for _ in range(3):
        x = next(batches)  # <-
        dist.all_reduce(x)


@bug(Kind.UNEVEN, (0,), EVEN, "deepspeedai/DeepSpeed#860")
def generation_ends_at_another_length() -> None:
    """Rank 0 has come to the end of its text; the others still gather weights for a token."""
    weight = ones(4)
    for _ in range(2 if rank() == 0 else 5):
        dist.all_gather(rows(weight), weight)  # <-
    dist.all_reduce(ones(1))  # <-


@bug(Kind.UNEVEN, (2,), EVEN, "deepspeedai/DeepSpeed#8262")
def generation_runs_into_the_teacher() -> None:
    """Rank 2 decodes longer; the others gather the teacher's weights on another line."""
    student, teacher = ones(4), ones(4)
    for _ in range(4 if rank() == 2 else 3):
        dist.all_gather(rows(student), student)  # <-
    for _ in range(2):
        dist.all_gather(rows(teacher), teacher)  # <-


@bug(Kind.UNEVEN, (2,), EVEN, "allenai/allennlp#5088")
def one_rank_resumes_elsewhere() -> None:
    """Rank 2 found its checkpoint and begins at epoch 2, the others at epoch 0."""
    for _ in range(2 if rank() == 2 else 0, 4):
        dist.all_reduce(ones(8))  # <-


@bug(
    (Kind.DIFFERENT_COLLECTIVE, Kind.SKIPPED, Kind.UNEVEN),
    (0,),
    "`if",
    "huggingface/transformers#31532",
)
def a_counter_that_only_rank_0_moves() -> None:
    """The progress bar counts on rank 0 only, and decides when to evaluate."""
    progress = 0
    for _ in range(4):
        dist.all_reduce(ones(8))
        progress += rank() == 0
        if progress == 2:
            scores = ones(2)
            dist.all_gather(rows(scores), scores)  # <-
            progress = 0


@bug(Kind.UNEVEN, (1,), "except", "pytorch/pytorch#18853")
def an_error_is_swallowed() -> None:
    """Rank 1 meets a broken file, swallows the error and so skips a step."""
    for step in range(3):
        try:
            if rank() == 1 and step == 1:
                raise OSError("broken file")
            dist.all_reduce(ones(8))  # <-
        except OSError:
            pass
    dist.barrier()  # <-


@bug(Kind.UNEVEN, (1,), EVEN, "pytorch/pytorch#38174")
def join_is_missing_in_the_second_epoch() -> None:
    """Rank 1 has one batch less in each of two epochs, with a barrier between them."""
    net = ddp()
    for _ in range(2):
        for _ in range(1 if rank() == 1 else 2):
            net(ones(2, 4)).sum().backward()  # <-
        dist.barrier()  # <-
