"""Pipeline parallelism: layers on different ranks exchange activations and gradients.

:func:`split` cuts a model into stages. :func:`pipeline_step` is the reference implementation of
GPipe and 1F1B with ``isend`` and ``recv``. ``torch.distributed.pipelining`` also supports several
stages per rank.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distkit.algorithms.contract import Group, isend, recv
from distkit.algorithms.sgd import Loss
from distkit_parallel.schedules import PIPELINES


def pipeline_step(
    stage: nn.Module,
    batch: tuple[Tensor, Tensor],
    loss_fn: Loss,
    *,
    microbatches: int,
    schedule: str = "1f1b",
    group: Group = None,
) -> Tensor:
    """Run a batch forward and backward through a pipeline of p ranks, with one stage on each.

    ::

        rank 0   F0 F1 F2 F3          B0       B1 …      F sends activations to the right,
        rank 1      F0 F1 F2       B0 F3    B1    …      B sends gradients to the left
        rank 2         F0 F1    B0 F2    B1 F3    …
        rank 3            F0 B0 F1 B1 F2 B2 F3 B3 …

    Gradients are accumulated in the stage's parameters, as in ``loss.backward()``. They equal the
    gradients of one process unless a layer, such as batch norm, mixes examples.

    Args:
        stage: this rank's layers. They map a tensor (rows, …) to one with the same number of rows.
        batch: inputs (B, …) and targets (B, …), both on every rank. The first rank reads the
            inputs, and the last rank reads the targets.
        loss_fn: a function that returns the mean loss of outputs and targets.
        microbatches: m, the number of micro-batches, from 1 to B; it may be smaller than p.
        schedule: "gpipe" or "1f1b".
        group: the process group; None means the default group.

    Returns:
        The mean loss of the batch, a float64 scalar on every rank.

    Raises:
        ValueError: The numbers of inputs and targets differ, there are more micro-batches than
            rows, the schedule is not supported, or the backend is NCCL.
        TypeError: A stage does not return a tensor with the same number of rows.

    Source:
        Huang et al., "GPipe", 2019; Narayanan et al., "Efficient large-scale language model
        training on GPU clusters using Megatron-LM", 2021.
    """
    _check_step(batch, microbatches, schedule, group)
    rank, last = dist.get_rank(group), dist.get_world_size(group) - 1
    left, right = _Link(rank - 1, group), _Link(rank + 1, group)
    inputs, targets = (t.tensor_split(microbatches) for t in batch)
    loss = torch.zeros((), dtype=torch.float64, device=batch[0].device)
    saved: dict[int, tuple[Tensor, Tensor]] = {}

    for _, kind, i in PIPELINES[schedule].orders(last + 1, microbatches)[rank]:
        rows = len(inputs[i])
        if kind == "F":
            x = inputs[i] if rank == 0 else left.receive_activations(rows, loss.device)
            y = stage(x)
            if rank == last:
                y = loss_fn(y, targets[i]) * rows / len(batch[0])
                loss += y.detach()
            else:
                right.send_activations(_check_output(y, rows, stage))
            saved[i] = x, y
        else:
            x, y = saved.pop(i)
            y.backward(None if rank == last else right.receive_gradients(y))
            if rank > 0:
                left.send(x.grad)  # type: ignore[arg-type]

    left.wait()
    right.wait()
    dist.broadcast(loss, group=group, group_src=last)
    return loss


class _Link:
    """A link to a neighboring rank. The shape and dtype of the activations are sent once."""

    def __init__(self, peer: int, group: Group) -> None:
        self.peer, self.group = peer, group
        self._meta: list[Any] = []
        self._pending_send: tuple[dist.Work, Tensor] | None = None

    def send(self, x: Tensor) -> None:
        """Start sending once the previous message has been sent."""
        self.wait()
        x = x.detach().contiguous()
        self._pending_send = isend(x, self.peer, self.group), x

    def send_activations(self, y: Tensor) -> None:
        if not self._meta:
            self._meta = [y.shape[1:], y.dtype]
            dist.send_object_list(self._meta, group=self.group, group_dst=self.peer)
        self.send(y)

    def receive_activations(self, rows: int, device: torch.device) -> Tensor:
        if not self._meta:
            self._meta = [None, None]
            dist.recv_object_list(self._meta, group=self.group, group_src=self.peer)
        shape, dtype = self._meta
        into = torch.empty(rows, *shape, dtype=dtype, device=device)
        return recv(into, self.peer, self.group).requires_grad_()

    def receive_gradients(self, y: Tensor) -> Tensor:
        return recv(torch.empty_like(y, requires_grad=False), self.peer, self.group)

    def wait(self) -> None:
        if self._pending_send:
            self._pending_send[0].wait()
            self._pending_send = None


#: Schedules with one stage per rank, whose backward is not split.
_SCHEDULES = ("gpipe", "1f1b")


def _check_step(
    batch: tuple[Tensor, Tensor], microbatches: int, schedule: str, group: Group
) -> None:
    rows = [len(t) for t in batch]
    if rows[0] != rows[1]:
        raise ValueError(
            f"pipeline_step got {rows[0]} inputs and {rows[1]} targets: pass one target per input"
        )
    if not 1 <= microbatches <= rows[0]:
        raise ValueError(
            f"microbatches must be from 1 to the number of rows, {rows[0]}; got {microbatches}"
        )
    if schedule not in _SCHEDULES:
        raise ValueError(
            f"pipeline_step supports {' and '.join(_SCHEDULES)}, not {schedule!r}: simulate it "
            "with dk.simulation.pipeline, or run it with torch.distributed.pipelining"
        )
    if dist.get_backend(group) == "nccl":
        raise ValueError(
            "pipeline_step sends activations and gradients in opposite directions, which deadlocks "
            "under NCCL: use gloo, or torch.distributed.pipelining, which sends them together"
        )


def _check_output(y: Any, rows: int, stage: nn.Module) -> Tensor:
    """Return ``y`` if a pipeline can send it."""
    if not isinstance(y, Tensor) or y.dim() == 0 or len(y) != rows:
        result = (
            f"a tensor of shape {tuple(y.shape)}" if isinstance(y, Tensor) else type(y).__name__
        )
        raise TypeError(
            f"pipeline_step: stage {type(stage).__name__} returned {result} for {rows} rows: "
            "a stage must return one tensor with the same number of rows"
        )
    return y


# -- splitting a model into stages ----------------------------------------------------------


def split(model: nn.Sequential, stages: int) -> list[nn.Sequential]:
    """Split a model into stages of consecutive layers, as evenly as possible.

    Layers keep their names. Each stage sends a single tensor to the next.

    Args:
        model: the layers in execution order.
        stages: number of stages.

    Raises:
        TypeError: The model is not a Sequential.
        ValueError: There are fewer layers than stages, or two stages share a parameter or buffer.

    Example:
        >>> layers = [nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)]
        >>> [len(stage) for stage in split(nn.Sequential(*layers), 2)]
        [2, 1]
    """
    if not isinstance(model, nn.Sequential):
        raise TypeError(
            f"split expects an nn.Sequential, not {type(model).__name__}: put its layers into one, "
            "or use torch.distributed.pipelining.pipeline, which traces a model"
        )
    layers = len(model)
    if not 1 <= stages <= layers:
        raise ValueError(f"stages must be from 1 to the number of layers, {layers}; got {stages}")
    named = list(zip(model._modules, model, strict=True))  # a layer may occur twice
    cuts = torch.arange(layers).tensor_split(stages)
    modules = [nn.Sequential(OrderedDict(named[i] for i in cut)) for cut in cuts]
    _check_shared(modules)
    return modules


def _check_shared(modules: Sequence[nn.Module]) -> None:
    """Check that no two stages share a parameter or buffer."""
    owners: dict[Tensor, tuple[int, str]] = {}
    for stage, module in enumerate(modules):
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            owner, first_name = owners.setdefault(tensor, (stage, name))
            if owner != stage:
                raise ValueError(
                    f"{first_name!r} of stage {owner} and {name!r} of stage {stage} are the same "
                    "tensor, but each rank would update a separate copy: untie them, or split "
                    "elsewhere"
                )
