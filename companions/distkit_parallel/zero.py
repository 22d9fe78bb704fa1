"""Sharded data parallelism (ZeRO), in which each of R replicas keeps 1/R of the states.

DDP keeps parameters, gradients and optimizer states on every rank. Stage 1 of ZeRO shards the
optimizer states, stage 2 also shards the gradients, and stage 3 the parameters as well::

                 before          forward, backward           step            after
    DDP          w               all-reduce g                everything      -
    stage 1      w               all-reduce g                own shard       all-gather w
    stage 2      w               reduce-scatter g            own shard       all-gather w
    stage 3      all-gather w    all-gather w, reduce-sc. g  own shard       -

An all-reduce is a reduce-scatter and an all-gather, so stage 2 sends as many bytes as DDP. Stages 1
and 3 send 1.5 times as many.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from distkit.algorithms.contract import Group, all_gather_single, reduce_scatter_single


class Zero:
    """A model whose optimizer states, gradients and parameters are sharded over the ranks.

    Use the model directly, with a different batch on each rank: ``loss.backward()`` averages the
    gradients over the ranks, and :meth:`step` updates the parameters. Each child module with
    parameters, including those in a ModuleList, is a unit: a flat vector whose r-th part is stored
    on rank r.

    Every rank must use the same units in the same order, as with DDP: collectives are matched
    only by their order, so ranks that skip different layers would mix up gradients or wait for each
    other.

    Args:
        model: the model, with the same weights on every rank.
        optimizer: a function that creates the optimizer for this rank's parts, such as
            ``lambda parts: torch.optim.Adam(parts, lr=1e-3)``. Its update must be elementwise.
        stage: 0 shards nothing, like DDP. 1 shards optimizer states, 2 adds gradients, and 3 adds
            parameters.
        group: the process group; None means the default group.

    Raises:
        ValueError: the stage is unknown, or two units share a parameter.

    Source:
        Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models",
        2020.

    Example:
        >>> import distkit as dk
        >>> def losses():
        ...     torch.manual_seed(0)
        ...     model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
        ...     zero = Zero(model, lambda parts: torch.optim.Adam(parts), stage=3)
        ...     loss = model(torch.ones(2, 4)).square().mean()
        ...     loss.backward()
        ...     zero.step()
        >>> dk.run_ranks(losses, 2)        # doctest: +SKIP
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        *,
        stage: int = 3,
        group: Group = None,
    ) -> None:
        if stage not in range(4):
            raise ValueError(f"ZeRO needs a stage from 0 to 3; got {stage}")
        units = [*_units(model)]
        self.units = [_Unit(module, parameters, stage, group) for module, parameters in units]
        self.optimizer = optimizer([unit.part for unit in self.units])

    def step(self) -> None:
        """Update this rank's parts, and gather the parameters in stages 1 and 2."""
        # the hooks skip units with parameters that the loss does not use
        for unit in reversed(self.units):
            unit.reduce_gradients()
        self.optimizer.step()
        for unit in self.units:
            unit.finish_step()


class _Unit:
    """A module's parameters, flattened into ``w``; ``part`` is this rank's shard."""

    def __init__(
        self,
        module: nn.Module,
        parameters: list[nn.Parameter],
        stage: int,
        group: Group,
    ) -> None:
        self.parameters, self.stage, self.group = parameters, stage, group
        self.shapes = [p.shape for p in parameters]
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.w = self._flatten([p.detach() for p in parameters])
        self.part = nn.Parameter(self._shard(self.w).clone() if stage == 3 else self._shard(self.w))
        self._view_parameters()
        # hooks would create cycles that the garbage collector cannot see
        unit = weakref.proxy(self)
        for p in parameters:
            p.register_post_accumulate_grad_hook(lambda p: unit._gradient_ready(p))
        if stage == 3:
            module.register_forward_pre_hook(self.gather)
            module.register_forward_hook(self._after_forward)
            for p in parameters:
                p.in_vector = True  # type: ignore[attr-defined]  # for sharding.shards
            self.free()

    def _view_parameters(self) -> None:
        """Make the model's parameters views of ``w``."""
        sizes = [shape.numel() for shape in self.shapes]
        parts = self.w[: sum(sizes)].split(sizes)
        for p, part, shape in zip(self.parameters, parts, self.shapes, strict=True):
            p.data = part.view(shape)

    def gather(self, *_: Any) -> None:
        """Gather ``w`` on every rank; stage 3 needs it before forward and backward."""
        if not self.w.untyped_storage().size():
            self.w.untyped_storage().resize_(self.w.nbytes)
            all_gather_single(self.w, self.part.detach(), group=self.group)
            self._view_parameters()

    def free(self) -> None:
        """Free ``w`` but keep ``part``, after forward and backward in stage 3."""
        for p in self.parameters:
            p.data = p.new_empty(0)
        self.w.untyped_storage().resize_(0)

    def _after_forward(self, _: nn.Module, inputs: Any, outputs: Any) -> None:
        self.free()
        for y in tree_leaves(outputs):
            if isinstance(y, Tensor) and y.requires_grad:
                y.register_hook(self.gather)

    def _gradient_ready(self, _: Tensor) -> None:
        """Reduce the unit's gradients once backward has computed all of them."""
        if all(p.grad is not None for p in self.parameters):
            self.reduce_gradients()

    def reduce_gradients(self) -> None:
        """Average gradients over the ranks; in stages 2 and 3, each rank gets only its part."""
        if not any(p.grad is not None for p in self.parameters):
            return
        g = self._flatten(
            [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        )
        if self.stage < 2:
            dist.all_reduce(g, group=self.group)
            gradient = self._shard(g)
        else:
            gradient = torch.empty_like(self.part)
            reduce_scatter_single(gradient, g, group=self.group)
        gradient /= self.ranks
        if self.part.grad is None:
            self.part.grad = gradient
        else:
            self.part.grad += gradient
        for p in self.parameters:
            p.grad = None
        if self.stage == 3:
            self.free()

    def finish_step(self) -> None:
        """Clear the gradient after the update; in stages 1 and 2, also gather ``w``."""
        self.part.grad = None
        if self.stage in (1, 2):
            all_gather_single(self.w, self.part.detach().clone(), group=self.group)

    def _shard(self, vector: Tensor) -> Tensor:
        """Return this rank's part of a vector, or the whole vector in stage 0."""
        return vector if self.stage == 0 else vector.chunk(self.ranks)[self.rank]

    def _flatten(self, tensors: list[Tensor]) -> Tensor:
        """Concatenate tensors into a vector, padded to a multiple of the number of ranks."""
        flat = torch.cat([t.reshape(-1) for t in tensors])
        return nn.functional.pad(flat, (0, -len(flat) % self.ranks))


def _units(model: nn.Module) -> Iterator[tuple[nn.Module, list[nn.Parameter]]]:
    """Yield the module and the parameters of each unit: the children, and the model itself."""
    owners: dict[nn.Parameter, str] = {}
    containers = list(_containers(model))
    children = [
        (prefix + name, child, child.parameters())
        for prefix, container in containers
        for name, child in container.named_children()
        if not _is_container(child)
    ]
    direct = chain(*(container.parameters(recurse=False) for _, container in containers))
    for name, module, parameters in [*children, ("the model itself", model, direct)]:
        trainable = [p for p in parameters if p.requires_grad]
        if shared := [owners[p] for p in trainable if p in owners]:
            raise ValueError(
                f"{name!r} and {shared[0]!r} share a parameter, which can be in only one unit: "
                "put both into one child of the model, or untie them"
            )
        owners.update(dict.fromkeys(trainable, name))
        if trainable:
            yield module, trainable


def _containers(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the model and its containers of layers, each with the name prefix of its children."""
    yield prefix, module
    for name, child in module.named_children():
        if _is_container(child):
            yield from _containers(child, f"{prefix}{name}.")


def _is_container(module: nn.Module) -> bool:
    """Return whether a module has no forward method, like a ModuleList or a ParameterDict."""
    return type(module).forward is nn.Module.forward
