"""Training a torch model through a KVStore, as Gluon's ``Trainer`` does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from distkit.errors import KVStoreError
from distkit.gone import GONE
from distkit.kvstore.client.create import create
from distkit.kvstore.client.worker import KVStore
from distkit.kvstore.protocol.optimizer import OptimizerSpec, Updater, groups_of, spec_of

#: Optimizers, each with the indices of its parameters; empty for all.
_Specs: TypeAlias = "list[tuple[OptimizerSpec, tuple[int, ...]]]"


class Trainer:
    """Updates every parameter with the gradients of all workers and devices.

    With ``update_on_kvstore=True`` the servers update the weights: each step pushes gradients and
    pulls weights, which replace local changes. With ``False`` they only add: each step pushes
    gradients and pulls their sum, and every worker makes the same update. Both give the same
    weights.

    Args:
        params: the parameters; for several devices a list of replicas per parameter; or a dict of
            either, in the order of its keys. Key ``i`` of the store is the i-th parameter.
        optimizer: as for :meth:`.KVStore.set_optimizer`. The current options of an instance of
            ``torch.optim`` are used in each step, so torch's schedulers work.
        optimizer_params: the options of an optimizer given by name or class.
        kvstore: a store or its name; None to update without a store. A name creates no store for
            one device of one process.
        compression_params: see :meth:`.KVStore.set_gradient_compression`.
        update_on_kvstore: by default True if there is a store.

    Raises:
        KVStoreError: The optimizer is unknown, or ``update_on_kvstore=False`` with dist_async,
            which has no sum of all gradients.

    >>> net = torch.nn.Linear(2, 1)
    >>> trainer = Trainer(net.parameters(), "sgd", {"learning_rate": 0.1})
    >>> net(torch.ones(4, 2)).sum().backward()
    >>> trainer.step(batch_size=4)

    Source: Apache MXNet, ``gluon.Trainer``.
    """

    def __init__(
        self,
        params: Iterable[Any] | Mapping[str, Any],
        optimizer: Any = "sgd",
        optimizer_params: Mapping[str, Any] | None = None,
        kvstore: KVStore | str | None = "device",
        *,
        compression_params: Mapping[str, Any] | None = None,
        update_on_kvstore: bool | None = None,
    ) -> None:
        self._params = _replicas(params)
        self._torch = optimizer if isinstance(optimizer, torch.optim.Optimizer) else None
        self._given: _Specs = [] if self._torch else [(spec_of(optimizer, optimizer_params), ())]
        self._given = self._specs(1)  # checks it
        self._store, self.update_on_kvstore = _store(kvstore, self._params, update_on_kvstore)
        if self._store is not None and compression_params is not None:
            self._store.set_gradient_compression(compression_params)
        self._updaters: dict[tuple[int, int], Updater] = {}  # by parameter and replica
        self._sent: _Specs = []  # the latest ones sent by this worker
        self._changes = 0
        self._batch_size = 0.0  # the divisor of those
        self._begun = False

    def __getattr__(self, name: str) -> Any:
        """Raise an error that names the replacement of a removed method."""
        raise AttributeError(GONE.get(f"Trainer.{name}", f"Trainer has no attribute {name!r}"))

    # -- one step ---------------------------------------------------------------

    def step(self, batch_size: float, ignore_stale_grad: bool = False) -> None:
        """Update every parameter; call it after ``backward`` instead of ``optimizer.step()``.

        Args:
            batch_size: the divisor of the sum of all gradients: the number of examples of all
                workers and devices if the loss is a sum over examples, the number of workers
                times devices if it is a mean.
            ignore_stale_grad: whether to skip parameters without a gradient instead of raising an
                error; under dist_sync they must be the same on all workers.

        Raises:
            KVStoreError: A parameter has no gradient, or the servers' ``batch_size`` would change.
        """
        if not self.update_on_kvstore:
            self.allreduce_grads(ignore_stale_grad)
            self.update(batch_size, ignore_stale_grad)
            return
        keys = self._ready(ignore_stale_grad)
        self._send_optimizers(self._specs(batch_size), batch_size)
        self._push_pull(keys, [self._params[k] for k in keys])

    def allreduce_grads(self, ignore_stale_grad: bool = False) -> None:
        """Replace each gradient by the sum over workers and devices, for example to clip it.

        Raises:
            KVStoreError: The servers update, so they keep no sums.
        """
        self._updates_here("allreduce_grads")
        keys = self._ready(ignore_stale_grad)
        if self._store is not None:
            self._push_pull(keys, [_gradients(self._params[k]) for k in keys])

    @torch.no_grad()
    def update(self, batch_size: float, ignore_stale_grad: bool = False) -> None:
        """Update the weights on this worker, with the current gradients.

        Raises:
            KVStoreError: The servers update.
        """
        self._updates_here("update")
        keys = self._ready(ignore_stale_grad)
        of = {k: spec for spec, ks in self._specs(batch_size) for k in ks or keys}
        for k in keys:
            for i, w in enumerate(self._params[k]):
                value = w.detach().reshape(-1)
                updater = self._updaters.get((k, i)) or Updater(of[k], value)
                self._updaters[k, i] = updater = updater.follow(of[k], value)
                assert w.grad is not None
                w.copy_(updater.update(value, w.grad.reshape(-1)).view_as(w))

    def _specs(self, batch_size: float) -> _Specs:
        """Return the optimizers of this step, with their current options."""
        found = self._given
        if self._torch is not None:
            number = {id(w): k for k, ws in enumerate(self._params) for w in ws}
            groups = groups_of(self._torch)
            numbers = [tuple(number[id(p)] for p in ps if id(p) in number) for _, ps in groups]
            one = not groups[1:]
            found = [(s, () if one else ks) for (s, _), ks in zip(groups, numbers, strict=True)]
        return [(spec.divided(batch_size), ks) for spec, ks in found]

    def _push_pull(self, keys: list[int], outs: Any) -> None:
        """Push and pull in the order of layers: forward needs those of the first ones first."""
        assert self._store is not None
        grads: Any = [_gradients(self._params[k]) for k in keys]
        self._store.pushpull(list(keys), grads, outs)

    def _ready(self, ignore_stale_grad: bool) -> list[int]:
        """Return the parameters with gradients; the first call sets the weights to worker 0's."""
        grads = [[w.grad for w in replicas] for replicas in self._params]
        ready = [k for k, made in enumerate(grads) if all(g is not None for g in made)]
        if len(ready) < len(self._params) and not ignore_stale_grad:
            missing = [k for k in range(len(self._params)) if k not in ready]
            raise KVStoreError(
                f"parameters {missing} have no gradient. "
                "Call backward() before each step, freeze them, or use ignore_stale_grad=True."
            )
        if self._store is not None and not self._begun:
            keys: Any = list(range(len(self._params)))
            self._store.init(keys, [replicas[0] for replicas in self._params])
            self._store.pull(keys, self._params)
        self._begun = True
        return ready

    def _updates_here(self, what: str) -> None:
        if self.update_on_kvstore:
            raise KVStoreError(
                f"{what} with update_on_kvstore=True: the servers update. Use step, or "
                "update_on_kvstore=False."
            )

    # -- what the servers hold --------------------------------------------------

    def _send_optimizers(self, specs: _Specs, batch_size: float) -> None:
        """Send these optimizers to the servers if they differ from the previous ones.

        No barrier is needed: the servers ignore a change that arrives after a later one of another
        worker.
        """
        assert self._store is not None
        if self._batch_size not in (0, batch_size) and "dist" in self._store.type:
            raise KVStoreError(
                f"step({batch_size:g}), but the servers divide by {self._batch_size:g} since the "
                "first step. Give the same batch_size, or use update_on_kvstore=False."
            )
        if specs != self._sent:
            for spec, keys in specs:
                self._store._set_optimizer(spec, keys, self._changes)
            self._sent, self._batch_size = specs, batch_size
            self._changes += 1

    # -- the learning rate --------------------------------------------------------

    @property
    def optimizer(self) -> OptimizerSpec | torch.optim.Optimizer:
        """The given ``torch.optim`` instance, or the specification of another optimizer."""
        return self._given[0][0] if self._torch is None else self._torch

    @property
    def learning_rate(self) -> float:
        """The step size of the next step."""
        return float(self._specs(1)[0][0].group["lr"])

    def set_learning_rate(self, lr: float) -> None:
        """Change the step size from the next step on; every worker calls it at the same step."""
        if self._torch is not None:
            for group in self._torch.param_groups:
                group["lr"] = lr
            return
        self._given = [(spec_of(self._given[0][0], {"lr": lr}), ())]


def _replicas(params: Iterable[Any] | Mapping[str, Any]) -> list[list[Tensor]]:
    """Return the replicas of each trainable parameter, without repetitions."""
    given = [params[k] for k in sorted(params)] if isinstance(params, Mapping) else list(params)
    found: dict[int, list[Tensor]] = {}
    for p in given:
        replicas = list(p) if isinstance(p, (list, tuple)) else [p]
        if not all(isinstance(w, torch.Tensor) for w in replicas) or not replicas:
            raise KVStoreError(
                f"Trainer got a {type(p).__name__} among its parameters. Give model.parameters()."
            )
        if replicas[0].requires_grad:
            found.setdefault(id(replicas[0]), replicas)
    if not found:
        raise KVStoreError("Trainer got no parameters to train. Give model.parameters().")
    return list(found.values())


def _gradients(replicas: Sequence[Tensor]) -> list[Tensor]:
    return [w.grad for w in replicas if w.grad is not None]


def _store(
    kvstore: KVStore | str | None, params: list[list[Tensor]], update: bool | None
) -> tuple[KVStore | None, bool]:
    """Return the store, and whether its servers update.

    A name creates no store for one device of one process, unless ``update`` is True.
    """
    if isinstance(kvstore, str):
        made = create(kvstore)
        alone = "dist" not in made.type and len(params[0]) == 1
        kvstore = None if alone and not update else made
    if kvstore is None:
        return None, False
    if not isinstance(kvstore, KVStore):
        raise KVStoreError(f"Trainer got kvstore={kvstore!r:.60}. Give a name, a store, or None.")
    if "async" in kvstore.type and update is False:
        raise KVStoreError(
            f'update_on_kvstore=False with "{kvstore.type}": there is no sum of all '
            "gradients to pull. Let the servers update, or use dist_sync."
        )
    return kvstore, update is not False
