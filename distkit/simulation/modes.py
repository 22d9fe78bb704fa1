"""The same training step imperative and compiled: its time, its memory, its all-reduces."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distkit.algorithms.sgd import sync_sgd_step


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
            only capture the graph, and are no faster than eager mode.
        lr: learning rate.
        steps: that are timed, after the first one, which compiles.

    Returns:
        A row per mode: ``mode``; ``first`` and ``step`` [s], ``graphs`` that were compiled,
        ``all_reduces`` of a step with their ``bytes``, the ``loss`` after the steps, ``memory``,
        the most that a step's tensors took on the network's device, besides what was there
        before [bytes], and a ``note`` on what was not measured.

    Raises:
        RuntimeError: there is no C++ compiler for "inductor"; on every rank.
        TypeError: the network is no ``nn.Sequential``, which can be broken after its first layer.

    Example:
        >>> def modes():
        ...     images, labels = dk.shard(*dk.demos.digits())
        ...     part = images[:64], labels[:64]
        ...     return measure_modes(dk.demos.model, part, F.cross_entropy, backend="aot_eager")
    """
    net = model()
    Broken(net)  # refuses what it cannot break, before anything is measured
    _check(backend, _device(net))
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

    Raises:
        TypeError: it is another module: its layers alone do not say what it computes.
    """

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        if type(net).forward is not nn.Sequential.forward:
            raise TypeError(
                f"a {type(net).__name__} cannot be broken after its first layer: measure_modes "
                "needs an nn.Sequential. Wrap the layers in one."
            )
        first, *rest = net.children()
        self.first, self.rest = first, nn.Sequential(*rest)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.rest(x)  # type: ignore[no-any-return]


def _device(net: nn.Module) -> torch.device:
    return next(net.parameters()).device


def _check(backend: str, device: torch.device) -> None:
    compilers = [os.environ.get("CXX", ""), "g++", "clang++"]
    if backend == "inductor" and device.type == "cpu":
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

    plain = model()
    net = prepare(plain)
    times = []

    def step() -> Tensor:
        sent.clear()
        return sync_sgd_step(net, batch, loss_fn, lr, all_reduce=all_reduce)

    with _one_by_one():
        for _ in range(1 + steps):
            begin = time.perf_counter()
            loss = step()
            times.append(time.perf_counter() - begin)
        memory = _peak(step, _device(plain))
    return {
        "mode": mode,
        "first": times[0],
        "step": median(times[1:]),
        "graphs": counters["unique_graphs"],
        "all_reduces": len(sent),
        "bytes": sum(sent),
        "loss": loss.item(),
        "memory": memory,
        "note": "",
    }


@contextmanager
def _one_by_one() -> Iterator[None]:
    """Let the compiler work in this process alone: ranks have no helpers, and end at once."""
    from torch._inductor import config

    with config.patch(compile_threads=1):
        yield


def _peak(step: Callable[[], Any], device: torch.device) -> int:
    """The most bytes that tensors took on the device during a step, besides those before it."""
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        step()
        return torch.cuda.max_memory_allocated(device) - before
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        step()
    assert profile.kineto_results is not None
    tree = profile.kineto_results.experimental_event_tree()
    kept: dict[int, int] = {}  # bytes, by address: the backend may still free an earlier step's
    most = now = 0
    for note in sorted(_allocations(tree), key=lambda note: int(note.start_time_ns)):
        address, nbytes = note.extra_fields.ptr, note.extra_fields.alloc_size
        if nbytes > 0:
            kept[address] = nbytes
        now += nbytes if nbytes > 0 else -kept.pop(address, 0)
        most = max(most, now)
    return most


def _allocations(events: Iterable[Any]) -> Iterator[Any]:
    """Where memory was taken and given back, in a profiler's events and those within."""
    for event in events:
        if event.tag == torch._C._profiler._EventType.Allocation:
            yield event
        yield from _allocations(event.children)


def _graphs(
    model: Callable[[], nn.Module],
    batch: tuple[Tensor, Tensor],
    loss_fn: Callable[[Tensor, Tensor], Tensor],
    lr: float,
    steps: int,
) -> dict[str, Any]:
    """With CUDA graphs, where the model is on a GPU."""
    mode = "CUDA graphs"
    if _device(model()).type != "cuda":
        return {"mode": mode, "note": "not measured: the network is not on a GPU"}

    def prepare(net: nn.Module) -> Any:
        return torch.compile(net, mode="reduce-overhead")

    return _measured(mode, prepare, model, batch, loss_fn, lr, steps)
