"""Parameters, gradients and optimizer state sharded across the ranks with torch's FSDP2."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from distkit.errors import StrategyError
from distkit_strategies.replica import ReplicaContext
from distkit_strategies.strategy import ReplicatedStrategy
from distkit_strategies.synchronous import (
    check_losses,
    first_not_finite,
    raise_not_finite,
    strategy_parameters,
)
from distkit_strategies.variables import CreatedVariables, owner_of, register_variable


class FullyShardedStrategy(ReplicatedStrategy):
    """Synchronous training in which each of R ranks keeps 1/R of every parameter (ZeRO-3).

    At the end of the scope, parameters get rank 0's values and are sharded along their first
    dimension. A layer's parameters are gathered before it computes and freed afterwards. Each rank
    receives its shard of the gradients by reduce-scatter, and updates its shard with its part of
    the optimizer's state. The result is the same as in one process. If a function raises on any
    rank, the gradients are discarded on all ranks.

    Args:
        reshard_after_forward: whether to free gathered parameters between the forward and the
            backward pass. False saves an all-gather (ZeRO-2).

    Raises:
        StrategyError: torch is older than 2.13 (at the end of a scope), or a gradient is sparse
            (in the backward pass).

    Source:
        Rajbhandari et al., "ZeRO", 2020; ``torch.distributed.fsdp.fully_shard``.

    Example:
        >>> cluster.run(train, FullyShardedStrategy())                # doctest: +SKIP
    """

    _sharded = True

    def __init__(self, reshard_after_forward: bool = True) -> None:
        super().__init__()
        self._reshard = reshard_after_forward
        #: Parameter, local shard and layer number, by the id of the original parameter.
        self._shards: dict[int, tuple[Tensor, Tensor, int]] = {}
        self._layers = 0
        self._nonfinite: dict[int, int] = {}  # layer -> a replica with a non-finite gradient
        self._used_models: WeakSet[Any] = WeakSet()  # models that have run a forward pass
        # backward's threads do not inherit context variables
        self._replica_context = ReplicaContext(self)

    # -- at the end of a scope -------------------------------------------------------------------

    def _after_scope(self, created: CreatedVariables) -> None:
        super()._after_scope(created)
        for root in () if self._single_replica else created.roots.values():
            self._shard(root)

    def _shard(self, root: nn.Module) -> None:
        from torch.distributed.device_mesh import init_device_mesh  # slow import
        from torch.distributed.fsdp import FSDPModule, fully_shard

        if not hasattr(FSDPModule, "reset_iter_state"):
            raise StrategyError(
                f"FullyShardedStrategy needs torch 2.13 or newer; this is {torch.__version__}. "
                "Update torch, or use another strategy."
            )
        original = dict(root.named_parameters())
        mesh = init_device_mesh(self.device.type, (self.num_replicas_in_sync,))
        for unit in _units(root):
            self._layers += 1
            check = partial(_check_gradients, type(unit).__name__)
            layer: Any = fully_shard(unit, mesh=mesh, reshard_after_forward=self._reshard)
            weight_gradients = partial(self._before_scatter, self._layers)
            layer.set_custom_all_gather(_Collective(dist.all_gather_single, self._before_gather))
            layer.set_custom_reduce_scatter(
                _Collective(dist.reduce_scatter_single, weight_gradients)
            )
            unit.register_forward_pre_hook(check)  # runs after FSDP2 has gathered the parameters
            for name, shard in root.named_parameters():
                if shard is not original[name]:
                    self._shards.setdefault(
                        id(original[name]), (original[name], shard, self._layers)
                    )
        for name, shard in root.named_parameters():
            register_variable(shard, self, owner_of(original[name])[1])  # type: ignore[index]
            original[name].data = original[name].data.new_empty(0)
        root.register_forward_pre_hook(lambda root, _: self._used_models.add(root), prepend=True)

    # -- hooks before collectives ---------------------------------------------------------------

    def _before_gather(self, parameters: Tensor) -> None:
        self._compare_collective("all_gather(parameters)", [parameters.numel()])

    def _before_scatter(self, layer: int, gradients: Tensor) -> None:
        """Weight this replica's gradients, since FSDP2 computes the unweighted mean.

        With n_r rows on replica r of R::

            Σ n_r g_r / Σ n_r = (1/R) Σ f_r g_r        f_r = R n_r / Σ n_r
        """
        rows, summed = (
            1 if self._replica_context.rows is None else self._replica_context.rows,
            self._replica_context.summed,
        )
        if not (rows or summed):
            gradients.zero_()  # the mean over no rows is NaN
        common, bad = [gradients.numel(), summed], first_not_finite([gradients])
        gathered = self._compare_collective("reduce_scatter(gradients)", common, [rows, bad])
        for replica, (*_, first_bad) in enumerate(gathered):
            if first_bad >= 0:
                self._nonfinite.setdefault(layer, replica)
        total = sum(s[2] for s in gathered) or 1
        gradients.mul_(len(gathered) * (1 if summed else rows / total))

    def _compare_collective(
        self, call: str, common: list[int], values: Sequence[int] = ()
    ) -> list[list[int]]:
        """Exchange values with all replicas once all have called the same collective of FSDP2.

        Raises:
            StrategyError: a replica has left the run, or is in a different layer; raised on all
                replicas.
        """
        gathered = self._compare(call, [*common, *values])
        if any(s[: len(common)] != gathered[0][: len(common)] for s in gathered):
            raise StrategyError(
                f"The replicas are in {call} for different layers, or only some of them used "
                "compute_average_loss. All replicas must run the same step. Look for an `if` that "
                "depends on the replica."
            )
        return gathered

    @contextmanager
    def _run(self, replica: ReplicaContext) -> Iterator[None]:
        self._replica_context, self._nonfinite = replica, {}
        try:
            with super()._run(replica):
                yield
        except Exception:
            for root in self._used_models:
                root.zero_grad()  # also those of gathered layers
            raise
        finally:
            self._replica_context = ReplicaContext(self)
            for root in self._used_models:
                root.reset_iter_state()  # keeps ranks in sync after an error

    # -- a step ----------------------------------------------------------------------------------

    def _local_optimizer(self, optimizer: Optimizer | None) -> Optimizer | None:
        """Replace an optimizer's original parameters with their shards."""
        for group in [] if optimizer is None else optimizer.param_groups:
            group["params"] = [self._shards.get(id(w), (w, w, 0))[1] for w in group["params"]]
        return optimizer

    @torch.no_grad()
    def _synchronize(self, optimizer: Optimizer, replica: ReplicaContext) -> None:
        """Check the gradients that FSDP2 reduced during the backward pass."""
        self._local_optimizer(optimizer)
        weights = strategy_parameters(self, optimizer)
        if self._single_replica:
            return
        check_losses(replica)
        nonfinite = {
            id(shard): self._nonfinite.get(layer) for _, shard, layer in self._shards.values()
        }
        weights.sort(key=lambda w: nonfinite.get(id(w)) is None)  # non-finite layers first
        gradients = [None if w.grad is None else w.grad.to_local() for w in weights]  # type: ignore[attr-defined]
        gathered = self._compare("optimizer.step", [first_not_finite(gradients)])
        if bad := [n for (n,) in gathered if n >= 0]:
            weight = weights[min(bad)]
            raise_not_finite(weight, replica, nonfinite.get(id(weight)))


def _check_gradients(kind: str, unit: nn.Module, _: object) -> None:
    """Make a layer's gathered parameters reject sparse gradients."""
    for name, w in unit.named_parameters():
        if w.requires_grad and not w._backward_hooks:
            w.register_hook(partial(_reject_sparse, f"{kind}.{name}"))


def _reject_sparse(name: str, gradient: Tensor) -> None:
    if gradient.is_sparse:
        raise StrategyError(
            f"The gradient of {name} is sparse, but FullyShardedStrategy needs dense gradients. "
            "Create the layer with sparse=False, or use MirroredStrategy, which converts them."
        )


class _Collective:
    """A collective for FSDP2 that first calls a hook.

    Args:
        collective: a function of ``torch.distributed`` with the arguments output, input, options.
        before: the hook, called with the input.
    """

    def __init__(self, collective: Callable[..., Any], before: Callable[[Tensor], None]) -> None:
        self._collective, self._before = collective, before

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: Any) -> Tensor:
        """Allocate memory for the collective's input or output."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, **options: Any) -> Any:
        self._before(input_tensor)
        return self._collective(output_tensor, input_tensor, **options)


def _units(root: nn.Module) -> list[nn.Module]:
    """Return the modules to shard: each layer of a model, then the model itself.

    Layers that share a parameter are sharded with the model.
    """
    from torch.distributed.fsdp import FSDPModule

    layers = [layer for child in root.children() for layer in _layers_of(child)]
    users = Counter(id(w) for layer in layers for w in layer.parameters())
    unshared = [layer for layer in layers if all(users[id(w)] == 1 for w in layer.parameters())]
    return [m for m in [*unshared, *_layers_of(root)] if not isinstance(m, FSDPModule)]


def _layers_of(module: nn.Module) -> list[nn.Module]:
    """Return the layers in a list or dict of modules, or the module itself if it has parameters."""
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        return [layer for child in module.children() for layer in _layers_of(child)]
    return [module] if next(module.parameters(), None) is not None else []
