"""Sharded data parallelism: replicas that keep 1/R of what they all have.

DDP holds parameters, gradients and the optimizer's states R times. ZeRO's stage 1 keeps a part of
the states on each rank, stage 2 also of the gradients, stage 3 also of the parameters::

                 before          forward, backward           step            after
    DDP          w               all-reduce g                on all          -
    stage 1      w               all-reduce g                on its part     all-gather w
    stage 2      w               reduce-scatter g            on its part     all-gather w
    stage 3      all-gather w    all-gather w, reduce-sc. g  on its part     -

An all-reduce is a reduce-scatter and an all-gather: stages 1 and 2 send what DDP sends, stage 3
half as much again.
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
from distkit.errors import TrainingError

Factory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class Zero:
    """A model whose states, gradients and parameters are sharded over the ranks.

    Use the model as it is, with another batch on each rank: ``loss.backward()`` averages the
    gradients over the ranks, :meth:`step` updates. Each child of the model with parameters is a
    unit: one flat vector, of which rank r keeps the r-th part. So is each child of a ModuleList.

    Every rank must use the same units in the same order, as their messages have no names: ranks
    that skip different layers would mix the layers' gradients, or wait for each other. So they
    compare what they are about to send before they send it, in an all-reduce of R numbers.

    Args:
        model: the same weights on every rank.
        optimizer: makes the optimizer of this rank's parts, such as
            ``lambda parts: torch.optim.Adam(parts, lr=1e-3)``; it must work element by element.
        stage: 0 shards nothing, as DDP; 1 the optimizer's states; 2 also gradients; 3 also
            parameters.
        group: the process group; None is the world.
        check: compare; False sends only what the paper does, and trusts the ranks.

    Raises:
        ValueError: There is no such stage, or two units share a parameter.
        TrainingError: Ranks use different units; on all of them, in ``forward``, ``backward`` or
            :meth:`step`.

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
        optimizer: Factory,
        *,
        stage: int = 3,
        group: Group = None,
        check: bool = True,
    ) -> None:
        if stage not in range(4):
            raise ValueError(f"ZeRO has stages 0 (none) to 3, not {stage}")
        found = [*_units(model)]
        self._agree = _Agreement([name for name, *_ in found], group, check)
        self.units = [
            _Unit(name, module, parameters, stage, group, self._agree)
            for name, module, parameters in found
        ]
        self.optimizer = optimizer([unit.part for unit in self.units])

    def step(self) -> None:
        """Update this rank's parts, and share them."""
        for unit in reversed(self.units):
            unit.reduce_gradients()  # of parameters that the loss did not reach
        self._agree("step()", self.units[0].part.device)
        self.optimizer.step()
        for unit in self.units:
            unit.share()


class _Agreement:
    """Compares what the ranks of a group are about to send.

    Args:
        units: their names, the same on every rank.
        group: the process group.
        check: False to compare nothing.
    """

    def __init__(self, units: list[str], group: Group, check: bool) -> None:
        self._known = ["step()", *(f"{call} of {u!r}" for u in units for call in _CALLS)]
        self._group, self._check = group, check

    def __call__(self, mine: str, device: torch.device) -> None:
        if not self._check:
            return
        table = torch.zeros(dist.get_world_size(self._group), dtype=torch.int64, device=device)
        table[dist.get_rank(self._group)] = self._known.index(mine)
        dist.all_reduce(table, group=self._group)
        if len({*table.tolist()}) > 1:
            said = ", ".join(f"rank {r}: {self._known[n]}" for r, n in enumerate(table.tolist()))
            raise TrainingError(
                f"the ranks of Zero are in different layers ({said}): their messages would mix. "
                "Use the same layers in the same order on every rank; let the loss of a rank that "
                "does without a layer contain its output times 0."
            )


_CALLS = GATHER, REDUCE = "the gather", "the gradients"


class _Unit:
    """The parameters of a module in one vector: w is whole, ``part`` is what this rank keeps."""

    def __init__(
        self,
        name: str,
        module: nn.Module,
        parameters: list[nn.Parameter],
        stage: int,
        group: Group,
        agree: _Agreement,
    ) -> None:
        self.name, self._agree = name, agree
        self.parameters, self.stage, self.group = parameters, stage, group
        self.shapes = [p.shape for p in parameters]
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.w = self._flat([p.detach() for p in parameters])
        self.part = nn.Parameter(self._mine(self.w).clone() if stage == 3 else self._mine(self.w))
        self._show()
        unit = weakref.proxy(self)  # the garbage collector does not see circles through these hooks
        for p in parameters:
            p.register_post_accumulate_grad_hook(lambda p: unit._count(p))
        if stage == 3:
            module.register_forward_pre_hook(self.gather)
            module.register_forward_hook(self._after_forward)
            for p in parameters:
                p.in_vector = True  # type: ignore[attr-defined]  # for dk.simulation.parallel.shards
            self.free()

    def _show(self) -> None:
        """Have the model's parameters look into w."""
        sizes = [shape.numel() for shape in self.shapes]
        parts = self.w[: sum(sizes)].split(sizes)
        for p, part, shape in zip(self.parameters, parts, self.shapes, strict=True):
            p.data = part.view(shape)

    def gather(self, *_: Any) -> None:
        """Stage 3, before forward and before backward: every rank gets w."""
        if not self.w.untyped_storage().size():
            self._agree(f"{GATHER} of {self.name!r}", self.w.device)
            self.w.untyped_storage().resize_(self.w.nbytes)
            all_gather_single(self.w, self.part.detach(), group=self.group)
            self._show()

    def free(self) -> None:
        """Stage 3, after forward and after backward: w is gone, ``part`` stays."""
        for p in self.parameters:
            p.data = p.new_empty(0)
        self.w.untyped_storage().resize_(0)

    def _after_forward(self, _: nn.Module, inputs: Any, outputs: Any) -> None:
        self.free()
        for y in tree_leaves(outputs):
            if isinstance(y, Tensor) and y.requires_grad:
                y.register_hook(self.gather)

    def _count(self, _: Tensor) -> None:
        """Backward has made a gradient; the last one of a unit completes it."""
        if all(p.grad is not None for p in self.parameters):
            self.reduce_gradients()

    def reduce_gradients(self) -> None:
        """Average gradients over the ranks; from stage 2 on each rank gets those of its part."""
        if not any(p.grad is not None for p in self.parameters):
            return
        self._agree(f"{REDUCE} of {self.name!r}", self.w.device)
        g = self._flat([torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters])
        if self.stage < 2:
            dist.all_reduce(g, group=self.group)
            mine = self._mine(g)
        else:
            mine = torch.empty_like(self.part)
            reduce_scatter_single(mine, g, group=self.group)
        mine /= self.ranks
        if self.part.grad is None:
            self.part.grad = mine
        else:
            self.part.grad += mine
        for p in self.parameters:
            p.grad = None
        if self.stage == 3:
            self.free()

    def share(self) -> None:
        """After the update, stages 1 and 2: every rank gets w."""
        self.part.grad = None
        if self.stage in (1, 2):
            all_gather_single(self.w, self.part.detach().clone(), group=self.group)

    def _mine(self, whole: Tensor) -> Tensor:
        """This rank's part; at stage 0 it is the whole."""
        return whole if self.stage == 0 else whole.chunk(self.ranks)[self.rank]

    def _flat(self, tensors: list[Tensor]) -> Tensor:
        """Tensors in one vector, with zeros at its end until all parts are equal."""
        flat = torch.cat([t.reshape(-1) for t in tensors])
        return nn.functional.pad(flat, (0, -len(flat) % self.ranks))


def _units(model: nn.Module) -> Iterator[tuple[str, nn.Module, list[nn.Parameter]]]:
    """The name and the parameters of each child, and those of the model itself."""
    seen: dict[nn.Parameter, str] = {}
    holders = list(_holders(model))
    children = [
        (before + name, child, child.parameters())
        for before, holder in holders
        for name, child in holder.named_children()
        if not _only_holds(child)
    ]
    own = chain(*(holder.parameters(recurse=False) for _, holder in holders))
    for name, module, parameters in [*children, ("the model itself", model, own)]:
        found = [p for p in parameters if p.requires_grad]
        if shared := [seen[p] for p in found if p in seen]:
            raise ValueError(
                f"{name!r} and {shared[0]!r} share a parameter, which can be in one unit only: "
                "put both into one child of the model, or untie them"
            )
        seen.update(dict.fromkeys(found, name))
        if found:
            yield name, module, found


def _holders(module: nn.Module, before: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The model, and what holds its layers without being called, with the prefix of the names."""
    yield before, module
    for name, child in module.named_children():
        if _only_holds(child):
            yield from _holders(child, f"{before}{name}.")


def _only_holds(module: nn.Module) -> bool:
    """Whether it has no forward, as a ModuleList or a ParameterDict."""
    return type(module).forward is nn.Module.forward
