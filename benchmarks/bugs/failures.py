"""A rank that fails, and others that wait for it: the first cause must come first."""

from __future__ import annotations

import os
import signal
import sys

import torch
import torch.distributed as dist

from benchmarks.bugs.catalogue import bug, ddp, ones, rank
from distkit.diagnosis.findings import Kind

RAISED, DIED = Kind.RAISED, Kind.DIED


@bug(RAISED, (1,), "loss is NaN", "ai2cm/ace#850", how="fails")
def nan_is_an_error() -> None:
    """Rank 1 raises since its loss is NaN; the others wait in backward."""
    net = ddp()
    for step in range(2):
        loss = net(ones(2, 4)).sum()
        if rank() == 1 and step == 1:
            raise ValueError("the loss is NaN")  # <-
        loss.backward()


@bug(RAISED, (1,), ("broken sample", "finally"), "pytorch/pytorch#44353")
def a_barrier_in_finally() -> None:
    """Rank 1 raises, and on its way out waits at a barrier in `finally`."""
    try:
        dist.all_reduce(ones(1))
        if rank() == 1:
            raise ValueError("broken sample")  # <-
        dist.all_reduce(ones(4))  # <-
    finally:
        dist.barrier()  # <-


@bug(RAISED, (2,), ("no such key", "except"), "pytorch/torchtitan#3863")
def a_reduction_in_except() -> None:
    """Rank 2 catches its error and reduces a flag, while the others send gradients."""
    net = ddp()
    try:
        if rank() == 2:
            raise KeyError("no such key")  # <-
        net(ones(2, 4)).sum().backward()
    except KeyError:
        dist.all_reduce(ones(1))  # <-
        raise


@bug(RAISED, (1,), ("broken sample", "__exit__"))
def a_context_that_synchronizes() -> None:
    """A context manager has a barrier at its end; rank 1 comes there with an exception."""

    class Together:
        def __enter__(self) -> None: ...

        def __exit__(self, *error: object) -> None:
            dist.barrier()  # <-

    with Together():
        if rank() == 1:
            raise ValueError("broken sample")  # <-
        dist.all_reduce(ones(4))  # <-


@bug(RAISED, (0,), "KeyError", "Lightning-AI/pytorch-lightning#19604", how="fails")
def a_key_is_missing_on_rank_0() -> None:
    """Only rank 0 formats the log line, with a key that is not there."""
    net = ddp()
    net(ones(2, 4)).sum().backward()
    if rank() == 0:
        str({"loss": 1.0}["accuracy"])  # <-
    net(ones(2, 4)).sum().backward()


@bug(RAISED, (2,), "labels", how="fails")
def an_assertion_on_one_rank() -> None:
    """Rank 2's shard has a label that is out of range."""
    labels = torch.tensor([0, 1, 12 if rank() == 2 else 2])
    assert int(labels.max()) < 10, "labels must be below 10"  # <-
    dist.all_reduce(ones(1))


@bug(RAISED, (1,), "IndexError", how="fails")
def an_index_out_of_range() -> None:
    """Rank 1's shard is shorter than the others'."""
    shard = list(range(2 if rank() == 1 else 3))
    for i in range(3):
        x = torch.tensor(float(shard[i]))  # <-
        dist.all_reduce(x)


@bug(RAISED, (0,), "exit", how="fails")
def exit_without_data() -> None:
    """Rank 0 finds no data and calls sys.exit."""
    if rank() == 0:
        sys.exit("no data")  # <-
    dist.barrier()  # <-


@bug(DIED, (1,), "os._exit", how="fails")
def an_exit_that_skips_everything() -> None:
    """Rank 1 ends its process with os._exit while the others send gradients."""
    net = ddp()
    net(ones(2, 4)).sum().backward()
    if rank() == 1:
        os._exit(3)
    net(ones(2, 4)).sum().backward()


@bug(DIED, (2,), "memory", how="fails")
def killed_for_memory() -> None:
    """The system kills rank 2, which uses too much memory."""
    dist.all_reduce(ones(4))
    if rank() == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(ones(4))


@bug(DIED, (0,), "native", how="fails")
def a_crash_in_native_code() -> None:
    """A library on rank 0 follows a null pointer."""
    import ctypes

    if rank() == 0:
        ctypes.string_at(0)
    dist.barrier()


@bug(RAISED, (1,), "shapes", how="fails")
def a_shape_error_on_one_rank() -> None:
    """Rank 1's batch has another number of features."""
    net = ddp()
    net(ones(2, 5 if rank() == 1 else 4)).sum().backward()  # <-
