"""Parameters, gradients and optimizer state divided among the ranks: torch's FSDP2."""

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
    own_parameters,
    refuse_not_finite,
)
from distkit_strategies.variables import Made, adopt, owned


class FullyShardedStrategy(ReplicatedStrategy):
    """Synchronous training in which each rank keeps 1/R of every parameter (ZeRO-3).

    Leaving the scope, parameters have rank 0's values and are cut along their first dimension.
    A layer's parameters are gathered before it computes, and freed afterwards; each rank gets its
    part of the gradients' sum by reduce-scatter, and updates its part with its part of the
    optimizer's state. The result is that of one process. When a function raises, on whichever
    rank, its gradients are lost on all.

    Args:
        reshard_after_forward: free gathered parameters between forward and backward; False
            keeps them, which saves an all-gather (ZeRO-2).

    Raises:
        StrategyError: at the end of a scope: this torch is older than 2.13; in backward: a
            gradient is sparse.

    Source:
        Rajbhandari et al., "ZeRO", 2020; ``torch.distributed.fsdp.fully_shard``.

    Example:
        >>> cluster.run(train, FullyShardedStrategy())                # doctest: +SKIP
    """

    _sharded = True

    def __init__(self, reshard_after_forward: bool = True) -> None:
        super().__init__()
        self._reshard = reshard_after_forward
        #: By id of a parameter as the scope made it: it, its piece here, and its layer's number.
        self._pieces: dict[int, tuple[Tensor, Tensor, int]] = {}
        self._layers = 0
        self._spoilt: dict[int, int] = {}  # layer -> a replica with a gradient that is not finite
        self._begun: WeakSet[Any] = WeakSet()  # models that have computed
        self._now = ReplicaContext(self)  # backward's threads see no context variables

    # -- at the end of a scope -------------------------------------------------------------------

    def _created(self, made: Made) -> None:
        super()._created(made)
        for root in () if self._alone else made.roots.values():
            self._shard(root)

    def _shard(self, root: nn.Module) -> None:
        from torch.distributed.device_mesh import init_device_mesh  # late: it takes a second
        from torch.distributed.fsdp import FSDPModule, fully_shard

        if not hasattr(FSDPModule, "reset_iter_state"):
            raise StrategyError(
                f"FullyShardedStrategy needs torch 2.13 or newer; this is {torch.__version__}. "
                "Update torch, or use another strategy."
            )
        whole = dict(root.named_parameters())
        mesh = init_device_mesh(self.device.type, (self.num_replicas_in_sync,))
        for unit in _units(root):
            self._layers += 1
            watch = partial(_watch_gradients, type(unit).__name__)
            layer: Any = fully_shard(unit, mesh=mesh, reshard_after_forward=self._reshard)
            weigh = partial(self._before_scatter, self._layers)
            layer.set_custom_all_gather(_Collective(dist.all_gather_single, self._before_gather))
            layer.set_custom_reduce_scatter(_Collective(dist.reduce_scatter_single, weigh))
            unit.register_forward_pre_hook(watch)  # after that of FSDP2, which gathers
            for name, mine in root.named_parameters():
                if mine is not whole[name]:
                    self._pieces.setdefault(id(whole[name]), (whole[name], mine, self._layers))
        for name, mine in root.named_parameters():
            adopt(mine, self, owned(whole[name])[1])  # type: ignore[index]
            whole[name].data = whole[name].data.new_empty(0)
        root.register_forward_pre_hook(lambda root, _: self._begun.add(root), prepend=True)

    # -- before FSDP2 communicates ---------------------------------------------------------------

    def _before_gather(self, parameters: Tensor) -> None:
        self._meet("all_gather(parameters)", [parameters.numel()])

    def _before_scatter(self, layer: int, gradients: Tensor) -> None:
        """Weigh this replica's gradients: FSDP2 takes the plain mean.

        With n_r rows on replica r of R::

            Σ n_r g_r / Σ n_r = (1/R) Σ f_r g_r        f_r = R n_r / Σ n_r
        """
        rows, summed = 1 if self._now.rows is None else self._now.rows, self._now.summed
        if not (rows or summed):
            gradients.zero_()  # the mean over no rows is NaN
        alike, bad = [gradients.numel(), summed], first_not_finite([gradients])
        shown = self._meet("reduce_scatter(gradients)", alike, [rows, bad])
        for replica, (*_, theirs) in enumerate(shown):
            if theirs >= 0:
                self._spoilt.setdefault(layer, replica)
        total = sum(s[2] for s in shown) or 1
        gradients.mul_(len(shown) * (1 if summed else rows / total))

    def _meet(self, call: str, alike: list[int], facts: Sequence[int] = ()) -> list[list[int]]:
        """The numbers of all replicas, once all are in the same collective of FSDP2.

        Raises:
            StrategyError: on all replicas: one has left the run, or is at another layer.
        """
        shown = self._compare(call, [*alike, *facts])
        if any(s[: len(alike)] != shown[0][: len(alike)] for s in shown):
            raise StrategyError(
                f"The replicas are in {call} of different layers, or only one of them used "
                "compute_average_loss. All replicas must make the same step: look for an `if` that "
                "depends on the replica."
            )
        return shown

    @contextmanager
    def _run(self, replica: ReplicaContext) -> Iterator[None]:
        self._now, self._spoilt = replica, {}
        try:
            with super()._run(replica):
                yield
        except Exception:
            for root in self._begun:
                root.zero_grad()  # also those of a layer that is gathered
            raise
        finally:
            self._now = ReplicaContext(self)
            for root in self._begun:
                root.reset_iter_state()  # the next run begins alike everywhere, whoever raised

    # -- a step ----------------------------------------------------------------------------------

    def _own(self, optimizer: Optimizer | None) -> Optimizer | None:
        """The optimizer with the pieces: made in the scope it has the whole parameters."""
        for group in [] if optimizer is None else optimizer.param_groups:
            group["params"] = [self._pieces.get(id(w), (w, w, 0))[1] for w in group["params"]]
        return optimizer

    @torch.no_grad()
    def _synchronize(self, optimizer: Optimizer, replica: ReplicaContext) -> None:
        """Check the gradients, which FSDP2 has summed during backward."""
        self._own(optimizer)
        weights = own_parameters(self, optimizer)
        if self._alone:
            return
        check_losses(replica)
        spoilt = {id(mine): self._spoilt.get(layer) for _, mine, layer in self._pieces.values()}
        weights.sort(key=lambda w: spoilt.get(id(w)) is None)  # those of spoilt layers first
        mine = [None if w.grad is None else w.grad.to_local() for w in weights]  # type: ignore[attr-defined]
        shown = self._compare("optimizer.step", [first_not_finite(mine)])
        if bad := [n for (n,) in shown if n >= 0]:
            weight = weights[min(bad)]
            refuse_not_finite(weight, replica, spoilt.get(id(weight)))


def _watch_gradients(kind: str, unit: nn.Module, _: object) -> None:
    """Check the gradients of a layer's parameters, which are gathered now, before FSDP2 does."""
    for name, w in unit.named_parameters():
        if w.requires_grad and not w._backward_hooks:
            w.register_hook(partial(_refuse_sparse, f"{kind}.{name}"))


def _refuse_sparse(name: str, gradient: Tensor) -> None:
    if gradient.is_sparse:
        raise StrategyError(
            f"The gradient of {name} is sparse, and FullyShardedStrategy cuts only dense ones. "
            "Make the layer with sparse=False, or use MirroredStrategy, which makes them dense."
        )


class _Collective:
    """A collective for FSDP2 that does something before.

    Args:
        collective: of ``torch.distributed``: output, input, options.
        before: gets the input.
    """

    def __init__(self, collective: Callable[..., Any], before: Callable[[Tensor], None]) -> None:
        self._collective, self._before = collective, before

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: Any) -> Tensor:
        """Memory for its input or output."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, **options: Any) -> Any:
        self._before(input_tensor)
        return self._collective(output_tensor, input_tensor, **options)


def _units(root: nn.Module) -> list[nn.Module]:
    """What is gathered together: each layer of a model, and then what is left of it.

    Layers with a parameter in common stay with the model.
    """
    from torch.distributed.fsdp import FSDPModule

    layers = [part for child in root.children() for part in _parts(child)]
    users = Counter(id(w) for layer in layers for w in layer.parameters())
    alone = [one for one in layers if all(users[id(w)] == 1 for w in one.parameters())]
    return [m for m in [*alone, *_parts(root)] if not isinstance(m, FSDPModule)]


def _parts(module: nn.Module) -> list[nn.Module]:
    """A layer with parameters; of a list of layers each."""
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        return [part for one in module.children() for part in _parts(one)]
    return [module] if next(module.parameters(), None) is not None else []
