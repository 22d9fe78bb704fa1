"""The same training step imperative and compiled: its time, its memory, its messages."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distkit.algorithms.sgd import sync_sgd_step

#: Backends of ``torch.compile`` that generate no code: they need no compiler, and save no time.
PLAIN = ("eager", "aot_eager")


def measure_modes(
    model: Callable[[], nn.Module],
    batch: tuple[Tensor, Tensor],
    loss_fn: Callable[[Tensor, Tensor], Tensor],
    *,
    backend: str = "inductor",
    lr: float = 0.01,
    steps: int = 10,
) -> list[dict[str, Any]]:
    """Measure a step of synchronous SGD eager, compiled, compiled with a graph break, and as graph.

    Args:
        model: makes the network, the same on every rank and for each mode.
        batch: this rank's inputs and targets.
        loss_fn: mean loss of outputs and targets.
        backend: of ``torch.compile``; "inductor" needs a C++ compiler, "aot_eager" and "eager"
            only capture the graph, and are as fast as eager mode.
        lr: learning rate.
        steps: that are timed, after the first one, which compiles.

    Returns:
        A row per mode: ``mode``; ``first`` and ``step`` [s], ``graphs`` that were compiled,
        ``messages`` of a step with their ``bytes``, the ``loss`` after the steps, ``memory``, the
        most that tensors took on a GPU [bytes], and a ``note`` on what was not measured.

    Raises:
        RuntimeError: there is no C++ compiler for "inductor"; on every rank.

    Example:
        >>> def modes():
        ...     images, labels = dk.shard(*dk.demos.digits())
        ...     part = images[:64], labels[:64]
        ...     return measure_modes(dk.demos.model, part, F.cross_entropy, backend="aot_eager")
    """
    _check(backend)
    kinds = {
        "eager": lambda net: net,
        f"compiled ({backend})": lambda net: torch.compile(net, backend=backend),
        f"graph break ({backend})": lambda net: torch.compile(Broken(net), backend=backend),
    }
    rows = [
        _measured(mode, prepare, model, batch, loss_fn, lr, steps)
        for mode, prepare in kinds.items()
    ]
    return [*rows, _graphs(model, batch, loss_fn, lr, steps)]


class Broken(nn.Module):
    """A network with a graph break after its first layer, as a ``print`` there would make.

    Args:
        net: a sequence of layers.
    """

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        first, *rest = net.children()
        self.first, self.rest = first, nn.Sequential(*rest)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.rest(x)  # type: ignore[no-any-return]


def _check(backend: str) -> None:
    compilers = [os.environ.get("CXX", ""), "g++", "clang++"]
    if backend == "inductor" and not torch.cuda.is_available():
        if not any(shutil.which(name) for name in compilers if name):
            raise RuntimeError(
                "torch.compile's backend 'inductor' needs a C++ compiler, and there is none here. "
                "Install one (apt install g++), or pass backend='aot_eager', which captures the "
                "graph and generates no code."
            )


def _measured(
    mode: str,
    prepare: Callable[[nn.Module], Any],
    model: Callable[[], nn.Module],
    batch: tuple[Tensor, Tensor],
    loss_fn: Callable[[Tensor, Tensor], Tensor],
    lr: float,
    steps: int,
) -> dict[str, Any]:
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters["stats"]
    counters.clear()
    sent: list[int] = []

    def all_reduce(tensor: Tensor) -> None:
        sent.append(tensor.nbytes)
        dist.all_reduce(tensor)

    with _one_by_one(), _memory() as memory:
        net = prepare(model())
        times = []
        for _ in range(1 + steps):
            sent.clear()
            begin = time.perf_counter()
            loss = sync_sgd_step(net, batch, loss_fn, lr, all_reduce=all_reduce)
            times.append(time.perf_counter() - begin)
    return {
        "mode": mode,
        "first": times[0],
        "step": median(times[1:]),
        "graphs": counters["unique_graphs"],
        "messages": len(sent),
        "bytes": sum(sent),
        "loss": loss.item(),
        "memory": memory[0],
        "note": "" if memory[0] is not None else "memory is measured on a GPU",
    }


@contextmanager
def _one_by_one() -> Iterator[None]:
    """Let the compiler work in this process alone: ranks have no helpers, and end at once."""
    from torch._inductor import config

    with config.patch(compile_threads=1):
        yield


@contextmanager
def _memory() -> Iterator[list[int | None]]:
    found: list[int | None] = [None]
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    yield found
    if torch.cuda.is_available():
        found[0] = torch.cuda.max_memory_allocated()


def _graphs(
    model: Callable[[], nn.Module],
    batch: tuple[Tensor, Tensor],
    loss_fn: Callable[[Tensor, Tensor], Tensor],
    lr: float,
    steps: int,
) -> dict[str, Any]:
    """With CUDA graphs, where the model is on a GPU."""
    mode = "CUDA graphs"
    if next(model().parameters()).device.type != "cuda":
        return {"mode": mode, "note": "not measured: the network is not on a GPU"}

    def prepare(net: nn.Module) -> Any:
        return torch.compile(net, mode="reduce-overhead")

    return _measured(mode, prepare, model, batch, loss_fn, lr, steps)
