"""Messages between stages that miss each other."""

from __future__ import annotations

import torch
import torch.distributed as dist

from benchmarks.bugs.catalogue import bug, ones, rank
from distkit.diagnosis.findings import Kind


@bug(Kind.CYCLE, (0, 1), "isend", "NVIDIA/nccl#479", ranks=2)
def both_send_first() -> None:
    """Both ranks send before they receive."""
    x = ones(4)
    dist.send(x, dst=1 - rank())  # <-
    dist.recv(x, src=1 - rank())


@bug(Kind.CYCLE, (0, 1), "receive first", "pytorch/pytorch#172668", ranks=2)
def forward_meets_backward() -> None:
    """Stage 0 sends its next activation, stage 1 its gradient, both at once."""
    x, other = ones(4), 1 - rank()
    for _ in range(2):
        if rank() == 0:
            dist.send(x, other)
        else:
            dist.recv(x, other)
    dist.send(x, other)  # <-
    dist.recv(x, other)


@bug(Kind.CYCLE, (0, 1, 2), "order", "pytorch/PiPPy#969")
def a_skip_connection() -> None:
    """Stage 2 wants the activation of stage 1 before the skip connection of stage 0."""
    x = ones(4)
    if rank() == 0:
        dist.send(x, dst=2)  # <-
        dist.send(x, dst=1)
    elif rank() == 1:
        dist.recv(x, src=0)  # <-
        dist.send(x, dst=2)
    else:
        dist.recv(x, src=1)  # <-
        dist.recv(x, src=0)


@bug(Kind.NO_SENDER, (0,), "send", ranks=2)
def a_micro_batch_is_missing() -> None:
    """Stage 0 sends three micro-batches, stage 1 waits for a fourth."""
    x = ones(4)
    for _ in range(3 if rank() == 0 else 4):
        if rank() == 0:
            dist.send(x, dst=1)
        else:
            dist.recv(x, src=0)  # <-


@bug(Kind.WRONG_TAG, (0, 1), "same tag", ranks=2)
def gradients_under_the_tag_of_activations() -> None:
    """Gradients are sent with tag 1 and awaited with tag 0."""
    x = ones(4)
    if rank() == 1:
        dist.send(x, dst=0, tag=1)  # <-
    else:
        dist.recv(x, src=1)  # <-


@bug(Kind.NO_RECEIVER, (0,), "recv")
def the_last_stage_sends_on() -> None:
    """The last stage sends to rank 0 as if the pipeline were a ring."""
    x, me = ones(4), rank()
    if me > 0:
        dist.recv(x, src=me - 1)
    dist.send(x, dst=(me + 1) % 3)  # <-


@bug(Kind.CYCLE, (0, 1, 2), "send first")
def the_first_stage_receives() -> None:
    """The first stage receives from the last one, which does not send."""
    x, me = ones(4), rank()
    dist.recv(x, src=(me - 1) % 3)  # <-
    if me < 2:
        dist.send(x, dst=me + 1)


@bug(Kind.NO_RECEIVER, (1,), "recv", "pytorch/pytorch#109401", ranks=2)
def a_batch_of_one_side() -> None:
    """Rank 0 exchanges in both directions, rank 1 only sends."""
    x, y = ones(4), torch.zeros(4)
    ops = [dist.P2POp(dist.isend, x, 1 - rank())]
    if rank() == 0:
        ops.insert(0, dist.P2POp(dist.irecv, y, 1))
    for work in dist.batch_isend_irecv(ops):
        work.wait()  # the send of rank 0 is never received


@bug(Kind.CYCLE, (0, 1), "order", ranks=2)
def tied_weights_before_the_flush() -> None:
    """Stage 1 reduces the tied weights before it has sent its last gradient."""
    x = ones(4)
    if rank() == 0:
        dist.send(x, dst=1)
        dist.recv(x, src=1)  # <-
        dist.all_reduce(x)
    else:
        dist.recv(x, src=0)
        dist.all_reduce(x)  # <-
        dist.send(x, dst=0)


@bug(Kind.WRONG_TENSOR, (0, 1), "shape", ranks=2, how="fails")
def sequences_of_another_length() -> None:
    """Stage 1 expects sequences of the full length, the last batch is longer."""
    if rank() == 0:
        dist.send(ones(2, 12), dst=1)  # <-
    else:
        dist.recv(torch.zeros(2, 8), src=0)  # <-


@bug(Kind.WRONG_SOURCE, (2,), "rank 1", "NVIDIA/nccl#784")
def the_wrong_neighbour() -> None:
    """Stage 2 waits for stage 0, but it is stage 1 that sends to it."""
    x = ones(4)
    if rank() == 0:
        dist.send(x, dst=1)
    elif rank() == 1:
        dist.recv(x, src=0)
        dist.send(x, dst=2)  # <-
    else:
        dist.recv(x, src=0)  # <-


@bug(Kind.NOT_WAITED, (0,), "wait()", ranks=2, how="finishes")
def a_request_is_dropped() -> None:
    """Stage 0 does not wait for what it sends."""
    x = ones(4)
    if rank() == 0:
        dist.isend(x, dst=1)  # <-
    else:
        dist.recv(x, src=0)
    dist.barrier()
