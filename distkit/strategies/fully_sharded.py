"""Parameters, gradients and optimizer state divided among the ranks: torch's FSDP2."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules import module
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from distkit.errors import StrategyError
from distkit.strategies import context
from distkit.strategies.context import ReplicaContext
from distkit.strategies.gradients import own_parameters
from distkit.strategies.mirrored import ReplicatedStrategy
from distkit.strategies.strategy import Strategy
from distkit.strategies.variables import adopt, owned


class FullyShardedStrategy(ReplicatedStrategy):
    """Synchronous training in which each rank keeps 1/R of every parameter (ZeRO-3).

    Leaving the scope, parameters have rank 0's values and are cut along their first dimension.
    A layer's parameters are gathered before it computes, and freed afterwards; each rank gets its
    part of the gradients' sum by reduce-scatter, and updates its part with its part of the
    optimizer's state. The result is that of one process.

    Args:
        reshard_after_forward: free gathered parameters between forward and backward; False
            keeps them, which saves an all-gather (ZeRO-2).

    Source:
        Rajbhandari et al., "ZeRO", 2020; ``torch.distributed.fsdp.fully_shard``.

    Example:
        >>> cluster.run(train, FullyShardedStrategy())                # doctest: +SKIP
    """

    def __init__(self, reshard_after_forward: bool = True) -> None:
        super().__init__()
        self._reshard = reshard_after_forward
        self._before: dict[int, tuple[Tensor, Tensor]] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Without the parameters of this process."""
        return {**super().__getstate__(), "_before": {}}

    @contextmanager
    def scope(self) -> Iterator[Strategy]:
        """As that of every strategy; at its end the models in it are sharded."""
        with super().scope(), _watched() as roots:
            yield self
        if not self._alone:
            for root in roots():
                self._shard(root)

    def _shard(self, root: nn.Module) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard  # late: it takes a second

        full = dict(root.named_parameters())
        mesh = init_device_mesh(self.device.type, (self.num_replicas_in_sync,))
        for unit in _units(root):
            fully_shard(unit, mesh=mesh, reshard_after_forward=self._reshard)
        root.register_forward_pre_hook(self._before_forward, prepend=True)  # before it gathers
        for name, mine in root.named_parameters():
            adopt(mine, self, owned(full[name])[1])  # type: ignore[index]
            self._before[id(full[name])] = full[name], mine
            full[name].data = full[name].data.new_empty(0)

    def _before_forward(self, *_: object) -> None:
        self._compare("forward", [])

    def _run(self) -> Any:
        return super()._run() if self._alone else self._weighted()

    @contextmanager
    def _weighted(self) -> Iterator[None]:
        with super()._run(), _Weighted(self):
            yield

    def _state_here(self, optimizer: Optimizer | None) -> Optimizer | None:
        """Made in the scope it has the whole parameters: give it the pieces."""
        for group in [] if optimizer is None else optimizer.param_groups:
            group["params"] = [self._before.get(id(w), (w, w))[1] for w in group["params"]]
        return optimizer

    @torch.no_grad()
    def _synchronize(self, optimizer: Optimizer, replica: ReplicaContext) -> None:
        """FSDP2 has summed the gradients during backward: see that all are finite."""
        self._state_here(optimizer)
        weights = own_parameters(self, optimizer)
        if self._alone:
            return
        local = [(w, w.grad.to_local()) for w in weights if w.grad is not None]  # type: ignore[attr-defined]
        bad = next((n for n, (_, g) in enumerate(local) if not g.isfinite().all()), -1)
        for r, (n,) in enumerate(self._compare("optimizer.step", [bad])):
            if n >= 0:
                raise StrategyError(
                    f"The gradient of {owned(local[n][0])[1]} is not finite in the part of rank "  # type: ignore[index]
                    f"{r}, in run {replica.number} of the strategy. No rank has made this step. "
                    "Look for NaN in the batches, or lower the learning rate."
                )


class _Weighted(TorchFunctionMode):
    """Weighs the loss of each replica's batch in ``backward``: FSDP2 takes the plain mean.

    With n_r rows on replica r of R, Σ n_r g_r / Σ n_r = (1/R) Σ f_r g_r for f_r = R n_r / Σ n_r.
    """

    def __init__(self, strategy: FullyShardedStrategy) -> None:
        super().__init__()
        self._strategy = strategy

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        backward: Any = Tensor.backward
        if func is backward:
            loss, rest = args[0], args[1:]
            kwargs = {**kwargs, **dict(zip(("gradient", "retain_graph"), rest, strict=False))}
            begin = kwargs.pop("gradient", None)
            begin = torch.ones_like(loss) if begin is None else begin
            return backward(loss, begin * self._factor(), **kwargs)
        return func(*args, **kwargs)

    def _factor(self) -> float:
        strategy, replica = self._strategy, context.replica()
        assert replica is not None
        rows = 1 if replica.rows is None else replica.rows
        shown = strategy._compare("backward", [rows, replica.summed])
        total = sum(s[0] for s in shown)
        if replica.summed or not total:
            return float(len(shown))
        return len(shown) * rows / total


@contextmanager
def _watched() -> Iterator[Callable[[], list[nn.Module]]]:
    """Collect the modules that are made meanwhile; the outermost are the models."""
    seen: WeakValueDictionary[int, nn.Module] = WeakValueDictionary()
    inner: set[int] = set()

    def has(owner: nn.Module, name: str, tensor: Any) -> None:
        seen.setdefault(id(owner), owner)

    def contains(owner: nn.Module, name: str, part: Any) -> None:
        seen.setdefault(id(owner), owner)
        inner.add(id(part))

    hooks = [
        module.register_module_parameter_registration_hook(has),
        module.register_module_module_registration_hook(contains),
    ]

    def roots() -> list[nn.Module]:
        return [m for i, m in seen.items() if i not in inner and any(True for _ in m.parameters())]

    try:
        yield roots
    finally:
        for hook in hooks:
            hook.remove()


def _units(root: nn.Module) -> list[nn.Module]:
    """What is gathered together: each layer of a model, and then what is left of it."""
    from torch.distributed.fsdp import FSDPModule

    layers = [part for child in root.children() for part in _parts(child)]
    shared = _shared(layers)
    alone = [part for part in layers if id(part) not in shared]
    return [m for m in [*alone, *_parts(root)] if not isinstance(m, FSDPModule)]


def _parts(module: nn.Module) -> list[nn.Module]:
    """A layer; of a list of layers each."""
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        return [part for one in module.children() for part in _parts(one)]
    return [module] if any(True for _ in module.parameters()) else []


def _shared(layers: list[nn.Module]) -> set[int]:
    """The layers that have a parameter in common with another: they stay with the model."""
    users: dict[int, list[int]] = {}
    for layer in layers:
        for w in layer.parameters():
            users.setdefault(id(w), []).append(id(layer))
    return {layer for used in users.values() if len(used) > 1 for layer in used}
