"""Parameters, gradients and optimizer state divided among the ranks: torch's FSDP2."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakSet, WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules import module
from torch.optim import Optimizer

from distkit.errors import StrategyError
from distkit_strategies.context import ReplicaContext
from distkit_strategies.gradients import (
    check_losses,
    first_not_finite,
    own_parameters,
    refuse_not_finite,
)
from distkit_strategies.mirrored import ReplicatedStrategy
from distkit_strategies.strategy import Strategy
from distkit_strategies.variables import adopt, owned


class Piece(NamedTuple):
    """A parameter as the scope made it, what this rank has of it, and the number of its layer."""

    whole: Tensor
    mine: Tensor
    unit: int


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
        StrategyError: at the end of the first scope: this torch is older than 2.13; in backward:
            a gradient is sparse.

    Source:
        Rajbhandari et al., "ZeRO", 2020; ``torch.distributed.fsdp.fully_shard``.

    Example:
        >>> cluster.run(train, FullyShardedStrategy())                # doctest: +SKIP
    """

    def __init__(self, reshard_after_forward: bool = True) -> None:
        super().__init__()
        self._reshard = reshard_after_forward
        self._forget()

    def _forget(self) -> None:
        self._pieces: dict[int, Piece] = {}  # by the identity of the whole
        self._begun: WeakSet[Any] = WeakSet()  # models that have computed
        self._layers = 0
        self._now: ReplicaContext | None = None  # backward's threads see no context variables
        self._spoilt: dict[int, int] = {}  # layer -> who had a gradient that is not finite

    def __getstate__(self) -> dict[str, Any]:
        """Without the parameters of this process."""
        own = ("_pieces", "_begun", "_layers", "_now", "_spoilt")
        return {k: v for k, v in super().__getstate__().items() if k not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._forget()
        self.__dict__.update(state)

    @contextmanager
    def scope(self) -> Iterator[Strategy]:
        """As that of every strategy; at its end the models in it are sharded."""
        with super().scope(), _watched() as roots:
            yield self
        if not self._alone:
            for root in roots():
                self._shard(root)

    def _shard(self, root: nn.Module) -> None:
        from torch.distributed.device_mesh import init_device_mesh  # late: it takes a second

        _check_version()
        whole = dict(root.named_parameters())
        mesh = init_device_mesh(self.device.type, (self.num_replicas_in_sync,))
        for unit in _units(root):
            self._shard_unit(unit, mesh)
            for name, mine in root.named_parameters():
                if mine is not whole[name] and id(whole[name]) not in self._pieces:
                    adopt(mine, self, owned(whole[name])[1])  # type: ignore[index]
                    self._pieces[id(whole[name])] = Piece(whole[name], mine, self._layers)
        for w in whole.values():
            w.data = w.data.new_empty(0)
        root.register_forward_pre_hook(self._begins, prepend=True)

    def _shard_unit(self, unit: nn.Module, mesh: Any) -> None:
        from torch.distributed.fsdp import fully_shard

        self._layers += 1
        watch = partial(_watch_gradients, type(unit).__name__)
        layer: Any = fully_shard(unit, mesh=mesh, reshard_after_forward=self._reshard)
        layer.set_custom_all_gather(_Collective(dist.all_gather_single, self._before_gather))
        weigh = partial(self._before_scatter, self._layers)
        layer.set_custom_reduce_scatter(_Collective(dist.reduce_scatter_single, weigh))
        unit.register_forward_pre_hook(watch)  # after that of FSDP2, which gathers

    def _begins(self, root: nn.Module, _: object) -> None:
        self._begun.add(root)

    # -- before FSDP2 communicates ---------------------------------------------------------------

    def _before_gather(self, parameters: Tensor) -> None:
        self._meet("all_gather(parameters)", [parameters.numel()])

    def _before_scatter(self, unit: int, gradients: Tensor) -> None:
        """Weigh this replica's gradients: FSDP2 takes the plain mean.

        With n_r rows on replica r of R::

            Σ n_r g_r / Σ n_r = (1/R) Σ f_r g_r        f_r = R n_r / Σ n_r
        """
        rows = 1 if self._now is None or self._now.rows is None else self._now.rows
        summed = self._now is not None and self._now.summed
        if not (rows or summed):
            gradients.zero_()  # the mean over no rows is NaN
        bad = first_not_finite([gradients])
        shown = self._meet("reduce_scatter(gradients)", [gradients.numel(), summed], [rows, bad])
        for replica, (*_, theirs) in enumerate(shown):
            if theirs >= 0:
                self._spoilt.setdefault(unit, replica)
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
            self._now = None
            for root in self._begun:
                root.reset_iter_state()  # the next run begins alike everywhere, whoever raised

    # -- a step ----------------------------------------------------------------------------------

    def _state_here(self, optimizer: Optimizer | None) -> Optimizer | None:
        """Made in the scope it has the whole parameters: give it the pieces."""
        for group in [] if optimizer is None else optimizer.param_groups:
            pieces = [self._pieces.get(id(w)) for w in group["params"]]
            both = zip(group["params"], pieces, strict=True)
            group["params"] = [w if piece is None else piece.mine for w, piece in both]
        return optimizer

    @torch.no_grad()
    def _synchronize(self, optimizer: Optimizer, replica: ReplicaContext) -> None:
        """FSDP2 has summed the gradients during backward: see that all are finite."""
        self._state_here(optimizer)
        weights = own_parameters(self, optimizer)
        if self._alone:
            return
        check_losses(replica)
        spoilt = {id(p.mine): self._spoilt.get(p.unit) for p in self._pieces.values()}
        weights.sort(key=lambda w: spoilt.get(id(w)) is None)  # in whose layer it began, first
        mine = [None if w.grad is None else w.grad.to_local() for w in weights]  # type: ignore[attr-defined]
        shown = self._compare("optimizer.step", [first_not_finite(mine)])
        bad = [s[0] for s in shown if s[0] >= 0]
        if bad:
            culprit = spoilt.get(id(weights[min(bad)]))
            refuse_not_finite(weights[min(bad)], replica, culprit)


def _watch_gradients(kind: str, unit: nn.Module, _: object) -> None:
    """See that the gradients of a unit's parameters, which are gathered now, can be cut."""
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


def _check_version() -> None:
    from torch.distributed.fsdp import FSDPModule

    if not hasattr(FSDPModule, "reset_iter_state"):
        raise StrategyError(
            f"FullyShardedStrategy needs torch 2.13 or newer; this is {torch.__version__}. Update "
            "torch, or use another strategy."
        )


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
