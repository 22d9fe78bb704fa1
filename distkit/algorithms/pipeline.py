"""Pipeline parallelism: layers on different ranks, activations and gradients as messages.

:func:`split` cuts a model into stages. :func:`pipeline_step` is the reference implementation: GPipe
and 1F1B with ``send`` and ``recv``. :class:`TorchPipeline` runs the same schedules, and those with
several stages per rank, with ``torch.distributed.pipelining``.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.fx.passes.split_module import split_module

from distkit.algorithms.catalogue import PIPELINES
from distkit.algorithms.contract import Group, isend, recv
from distkit.algorithms.sgd import Loss


def pipeline_step(
    stage: nn.Module,
    batch: tuple[Tensor, Tensor],
    loss_fn: Loss,
    *,
    microbatches: int,
    schedule: str = "1f1b",
    group: Group = None,
) -> Tensor:
    """Run a batch forward and backward through a pipeline of p ranks, one stage on each.

    ::

        rank 0   F0 F1 F2 F3          B0       B1 …      F sends activations to the right,
        rank 1      F0 F1 F2       B0 F3    B1    …      B sends gradients to the left
        rank 2         F0 F1    B0 F2    B1 F3    …
        rank 3            F0 B0 F1 B1 F2 B2 F3 B3 …

    Gradients are accumulated in the stage's parameters, as ``loss.backward()`` does. They equal the
    gradients of one process if no layer mixes examples, as batch norm does.

    Args:
        stage: this rank's layers; they map a tensor (rows, …) to one with the same number of rows.
        batch: inputs (B, …) and targets (B, …), both on every rank; the first rank reads the
            inputs, the last one the targets.
        loss_fn: mean loss of outputs and targets.
        microbatches: m, the number of micro-batches: from 1 to B; may be smaller than p.
        schedule: "gpipe" or "1f1b".
        group: the process group; None is the world.

    Returns:
        The mean loss of the batch, a float64 scalar on every rank.

    Raises:
        ValueError: There are more micro-batches than rows, a rank has several stages in this
            schedule, or the backend is NCCL.
        TypeError: A stage does not return such a tensor.

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
    """Messages to and from a neighbour; a message with the shape precedes the first ones."""

    def __init__(self, peer: int, group: Group) -> None:
        self.peer, self.group = peer, group
        self._meta: list[Any] = []
        self._sending: tuple[dist.Work, Tensor] | None = None

    def send(self, x: Tensor) -> None:
        """Start sending once the previous message is sent."""
        self.wait()
        x = x.detach().contiguous()
        self._sending = isend(x, self.peer, self.group), x

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
        if self._sending:
            self._sending[0].wait()
            self._sending = None


def _check_step(
    batch: tuple[Tensor, Tensor], microbatches: int, schedule: str, group: Group
) -> None:
    rows = [len(t) for t in batch]
    if rows[0] != rows[1]:
        raise ValueError(f"pipeline_step: {rows[0]} inputs and {rows[1]} targets: give as many")
    if not 1 <= microbatches <= rows[0]:
        raise ValueError(
            f"pipeline_step: a batch of {rows[0]} rows in {microbatches} micro-batches: "
            f"give microbatches from 1 to {rows[0]}"
        )
    if PIPELINES[schedule].looped:
        raise ValueError(f"pipeline_step has one stage a rank: run {schedule!r} by TorchPipeline")
    if not PIPELINES[schedule].peer:
        raise ValueError(
            f"pipeline_step computes a backward at once: dk.simulation.pipeline plays {schedule!r}"
        )
    if dist.get_backend(group) == "nccl":
        raise ValueError(
            "pipeline_step sends activations and gradients past each other, which would wait for "
            "each other under NCCL: use TorchPipeline, which sends them together, or gloo"
        )


def _check_output(y: Any, rows: int, stage: nn.Module) -> Tensor:
    """Return ``y`` if a pipeline can send it."""
    if not isinstance(y, Tensor) or y.dim() == 0 or len(y) != rows:
        what = f"a tensor of {tuple(y.shape)}" if isinstance(y, Tensor) else type(y).__name__
        raise TypeError(
            f"pipeline_step: stage {type(stage).__name__} returned {what} for {rows} rows: "
            f"a stage sends one tensor with as many rows to the next"
        )
    return y


# -- splitting a model into stages ----------------------------------------------------------


def split(model: nn.Module, stages: int) -> list[nn.Module]:
    """Split a model into stages of consecutive layers, with equal numbers of layers if possible.

    Layers are the children of the model and keep their names; one tensor is sent between stages.

    Args:
        model: a Sequential, or a module whose ``forward`` :mod:`torch.fx` can trace.
        stages: number of stages.

    Raises:
        ValueError: There are fewer layers than stages, two stages share a parameter or buffer, the
            model does not use its layers in order, or a skip connection crosses stages: a layer
            needs an output that is neither of its own stage nor the last of the stage before.

    Example:
        >>> layers = [nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)]
        >>> [len(stage) for stage in split(nn.Sequential(*layers), 2)]
        [2, 1]
    """
    children = dict(model.named_children())
    if isinstance(model, nn.Sequential):  # may contain one layer twice
        children = dict(zip(model._modules, model, strict=True))
    layers = len(children)
    if not 1 <= stages <= layers:
        raise ValueError(f"{stages} stages of a model of {layers} layers: give from 1 to {layers}")
    cuts, order = torch.arange(layers).tensor_split(stages), list(children)
    names = [[order[i] for i in cut] for cut in cuts]
    if isinstance(model, nn.Sequential):
        parts: list[nn.Module] = [
            nn.Sequential(OrderedDict((n, children[n]) for n in part)) for part in names
        ]
    else:
        parts = _split_traced(model, names)
    _check_shared(parts)
    return parts


def _split_traced(model: nn.Module, names: list[list[str]]) -> list[nn.Module]:
    """Return the stages of a model with a custom ``forward``."""
    graph = fx.GraphModule(model, _Layers().trace(model))
    stage_of = _assign_stages(
        graph, {name: stage for stage, part in enumerate(names) for name in part}
    )
    _check_order(stage_of, names)
    _check_crossings(graph, stage_of)
    cut = split_module(graph, model, lambda node: stage_of[node])
    return [getattr(cut, f"submod_{s}") for s in range(len(names))]


class _Layers(fx.Tracer):
    """Traces a model without entering its children."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


def _assign_stages(graph: fx.GraphModule, names: dict[str, int]) -> dict[fx.Node, int]:
    """Return the stage of each node: that of its layer, or the latest stage of its inputs."""
    stage_of: dict[fx.Node, int] = {}
    for node in graph.graph.nodes:
        layer_stage = (
            names.get(str(node.target).split(".")[0], 0) if node.op == "call_module" else 0
        )
        stage_of[node] = max([layer_stage, *(stage_of[source] for source in node.all_input_nodes)])
    return stage_of


def _check_order(stage_of: dict[fx.Node, int], names: list[list[str]]) -> None:
    """Check that no stage is empty."""
    found = {stage for node, stage in stage_of.items() if node.op == "call_module"}
    for stage, layers in enumerate(names):
        if stage not in found:
            raise ValueError(
                f"stage {stage} would be empty: the model uses {', '.join(map(repr, layers))} "
                "after layers of later stages, or never. Define layers in the order of their use"
            )


def _check_shared(parts: Sequence[nn.Module]) -> None:
    """Check that no two stages share a parameter or buffer."""
    seen: dict[Tensor, tuple[int, str]] = {}
    for stage, part in enumerate(parts):
        for name, tensor in [*part.named_parameters(), *part.named_buffers()]:
            before, first = seen.setdefault(tensor, (stage, name))
            if before != stage:
                raise ValueError(
                    f"{first!r} of stage {before} and {name!r} of stage {stage} are one tensor, of "
                    "which each rank would update a copy of its own: untie them, or split elsewhere"
                )


def _check_crossings(graph: fx.GraphModule, stage_of: dict[fx.Node, int]) -> None:
    """Check that each stage needs only the last output of its predecessor."""
    crossing: dict[int, fx.Node] = {}
    for node in graph.graph.nodes:
        for source in node.all_input_nodes:
            node_stage, source_stage = stage_of[node], stage_of[source]
            if node.op == "output" or node_stage == source_stage:
                continue
            if (
                node_stage != source_stage + 1
                or crossing.setdefault(node_stage, source) is not source
            ):
                raise ValueError(
                    f"layer {_name(node)!r} of stage {node_stage} needs the output of "
                    f"{_name(source)!r} of stage {source_stage}: a skip connection across stages, "
                    "while a pipeline sends one tensor from each stage to the next. "
                    "Split elsewhere, or let the tensor travel through the layers between"
                )


def _name(node: fx.Node) -> str:
    return str(node.target) if node.op == "call_module" else node.name


# -- torch's own executor ---------------------------------------------------------------------


class TorchPipeline:
    """A pipeline run by ``torch.distributed.pipelining``, with one or several stages per rank.

    Args:
        stages: this rank's layers: one stage, or several; the i-th is stage i·p + rank.
        loss_fn: mean loss of outputs and targets.
        microbatches: m.
        schedule: the name of a schedule in ``dk.algorithms.PIPELINES``.
        group: the process group; None is the world.
        device: device of the stages.

    Raises:
        ValueError: Torch does not support these numbers of ranks, stages and micro-batches.
    """

    def __init__(
        self,
        stages: nn.Module | Sequence[nn.Module],
        loss_fn: Loss,
        *,
        microbatches: int,
        schedule: str = "1f1b",
        group: Group = None,
        device: torch.device | str = "cpu",
    ) -> None:
        from torch.distributed import pipelining  # slow import

        own_stages = [stages] if isinstance(stages, nn.Module) else list(stages)
        self.group, self.microbatches, self.device = group, microbatches, torch.device(device)
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        check_torch(schedule, self.ranks, microbatches, len(own_stages))
        torch_stages = [
            pipelining.PipelineStage(
                stage,
                i * self.ranks + self.rank,
                len(own_stages) * self.ranks,
                self.device,
                group=group,
            )
            for i, stage in enumerate(own_stages)
        ]
        if not PIPELINES[schedule].peer:
            raise ValueError(f"torch has no schedule {schedule!r}: dk.simulation.pipeline plays it")
        kind = getattr(pipelining, PIPELINES[schedule].peer)
        looped = PIPELINES[schedule].looped
        self._schedule = kind(
            torch_stages if looped else torch_stages[0], microbatches, loss_fn=loss_fn
        )

    def step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Run a batch forward and backward; see :func:`pipeline_step`.

        Raises:
            ValueError: The micro-batches would differ in size, but torch weights them equally.
        """
        (inputs, targets), last = batch, self.ranks - 1
        if len(inputs) % self.microbatches:
            raise ValueError(
                f"a batch of {len(inputs)} rows in {self.microbatches} micro-batches: torch would "
                f"weight unequal ones alike. Give a multiple of {self.microbatches} rows"
            )
        losses: list[Tensor] = []
        args = (inputs,) if self.rank == 0 else ()
        ends = {"target": targets, "losses": losses} if self.rank == last else {}
        self._schedule.step(*args, **ends)
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        loss += sum(part.detach() for part in losses) / self.microbatches
        dist.broadcast(loss, group=self.group, group_src=last)
        return loss


def check_torch(schedule: str, ranks: int, microbatches: int, chunks: int = 1) -> None:
    """Check that torch can run a schedule.

    Raises:
        ValueError: It cannot; the message has the numbers.

    Example:
        >>> check_torch("1f1b", ranks=4, microbatches=2)
        Traceback (most recent call last):
        ValueError: torch's Schedule1F1B needs a micro-batch a stage: 2 are fewer than 4. ...
    """
    if schedule == "1f1b" and microbatches < ranks:
        raise ValueError(
            f"torch's Schedule1F1B needs a micro-batch a stage: {microbatches} are fewer than "
            f"{ranks}. Give {ranks} or more, or use pipeline_step"
        )
    PIPELINES[schedule].orders(ranks, microbatches, chunks)
