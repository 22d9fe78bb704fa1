"""Replaces the algorithm of ``dist.all_reduce``, which DDP also uses, with one of distkit's."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from distkit.algorithms.all_reduce import ALL_REDUCES
from distkit.algorithms.contract import SUM, Group, ReduceOp, hosts_of
from distkit.algorithms.shared_memory import shared_memory_all_reduce

#: A function that reduces a tensor in place, with the contract of ``dist.all_reduce``.
AllReduce = Callable[..., Any]

#: Size from which bandwidth matters more than latency between hosts [bytes].
LARGE = 1 << 16


@contextmanager
def use_algorithm(algorithm: str | AllReduce = "auto") -> Iterator[None]:
    """Run ``dist.all_reduce``, which DDP also uses, with ``algorithm`` on this rank.

    Every rank must enter the context. The trace shows the collective with its messages inside.

    Args:
        algorithm: a name in :data:`~distkit.algorithms.all_reduce.ALL_REDUCES`,
            ``"shared_memory"``, ``"auto"``, or a function ``f(x, op, group)`` that works in place.
            For CPU tensors, and under gloo for GPU tensors too, ``"auto"`` uses
            ``"shared_memory"`` if hosts have several ranks, except for small tensors on many
            hosts. Otherwise, it uses ``"halving_doubling"`` for small tensors and ``"ring"`` for
            large ones.

    Raises:
        ValueError: The algorithm is unknown.
        RuntimeError: This process is not a rank.

    Example:
        >>> import distkit as dk, torch, torch.distributed as dist
        >>> def total():
        ...     x = torch.ones(2)
        ...     with dk.algorithms.use_algorithm("ring"):
        ...         dist.all_reduce(x)
        ...     return x.tolist()
        >>> dk.run_ranks(total, 3).results[0]        # doctest: +SKIP
        [3.0, 3.0]
    """
    kernel = partial(_all_reduce, implementation(algorithm))
    if not dist.is_initialized():
        raise RuntimeError(
            "dk.algorithms.use_algorithm was entered in a process that is not a rank, where it has "
            "no effect. Enter it inside the function that runs on the ranks."
        )
    library = torch.library.Library("c10d", "IMPL")
    try:
        with warnings.catch_warnings():  # torch warns that a kernel is overridden
            warnings.simplefilter("ignore")
            for device in ("CPU", "CUDA"):
                library.impl("allreduce_", kernel, device, allow_override=True)
        yield
    finally:
        library._destroy()


def implementation(algorithm: str | AllReduce) -> AllReduce:
    """Return the function of an algorithm by name.

    Raises:
        ValueError: The algorithm is unknown.
    """
    if callable(algorithm):
        return algorithm
    functions: dict[str, AllReduce] = _WITHOUT_SCHEDULE | {
        name: a.reference for name, a in ALL_REDUCES.items()
    }
    if algorithm not in functions:
        names = ", ".join(f'"{name}"' for name in functions)
        raise ValueError(f'unknown all-reduce "{algorithm}". Choose from: {names}.')
    return functions[algorithm]


def auto_all_reduce(x: Tensor, op: ReduceOp = SUM, group: Group = None) -> None:
    """Reduce ``x`` with the algorithm that suits its size and the hosts of the group.

    Args:
        x: a tensor with the same shape on every rank.
        op: SUM, MIN, MAX or PRODUCT.
        group: the process group; None means the default group.
    """
    pg = group or dist.group.WORLD
    if pg is None or dist.get_rank(pg) < 0:
        return
    hosts, n, large = len(hosts_of(pg)), dist.get_world_size(pg), x.nbytes >= LARGE
    rounds = (n - 1).bit_length()  # of halving; there are as many of doubling
    use_hosts = large or hosts - 1 <= rounds
    by_host = x.is_cpu or dist.get_backend(pg) == "gloo"  # gloo stages through host memory anyway
    if by_host and (hosts == 1 or (hosts < n and use_hosts)):
        shared_memory_all_reduce(x, op, pg)
    else:
        ALL_REDUCES["ring" if large else "halving_doubling"].reference(x, op, pg)


#: Algorithms without a message schedule, by name.
_WITHOUT_SCHEDULE = {"auto": auto_all_reduce, "shared_memory": shared_memory_all_reduce}

_create_work: Any = torch._C._distributed_c10d._create_work_from_future  # type: ignore[attr-defined]


def _all_reduce(
    run: AllReduce,
    tensors: list[Tensor],
    group: Any,
    _op: object,
    _sparse: object,
    _async: bool = True,
    _timeout: int = -1,
) -> tuple[list[Tensor], Any]:
    """Implement the operator ``c10d::allreduce_`` synchronously with ``run``."""
    op, pg = _caller_reduction(sys._getframe(1)), dist.ProcessGroup.unbox(group)
    for x in tensors:
        run(x, op, pg)
    return tensors, _create_work(_completed_future(tensors)).boxed() if _async else _reusable.work


def _caller_reduction(frame: FrameType | None) -> Any:
    """Return the reduction from the caller's frame; the operator receives an opaque object.

    DDP's reducer calls the operator from C++ with gradients that it has already divided, so the
    reduction is a sum.
    """
    for _ in range(3):  # the recorder may add frames
        if frame is not None and frame.f_code.co_filename == c10d.__file__:
            return frame.f_locals.get("op", dist.ReduceOp.SUM)
        frame = frame and frame.f_back
    return dist.ReduceOp.SUM


def _completed_future(value: Any) -> Any:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(value)
    return future


class _ReusableWork(threading.local):
    """A completed ``Work`` that is reused: creating one takes longer than a small all-reduce.

    It is thread-local, because recorders identify operations in flight by their work object.
    """

    def __init__(self) -> None:
        self.work = _create_work(_completed_future(None)).boxed()


_reusable = _ReusableWork()
