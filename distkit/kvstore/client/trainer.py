"""A trainer of torch models through a KVStore, like Gluon's ``Trainer``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from distkit.errors import KVStoreError
from distkit.kvstore.client.create import create
from distkit.kvstore.client.worker import KVStore
from distkit.kvstore.protocol.optimizer import OptimizerSpec, Updater, groups_of, spec_of

#: Optimizers, each with the indices of its parameters; empty for all.
_Specs: TypeAlias = "list[tuple[OptimizerSpec, tuple[int, ...]]]"


class Trainer:
    """Updates every parameter with the gradients of all workers and devices.

    With ``update_on_kvstore=True`` the servers update the weights: each step pushes gradients and
    pulls weights, which replace local changes. With ``False`` the servers only add: each step
    pushes gradients and pulls their sum, and every worker makes the same update. Both lead to the
    same weights.

    Args:
        params: the parameters; for several devices a list of replicas per parameter; or a dict of
            either, in the order of its keys. Key ``i`` of the store is the i-th parameter.
        optimizer: as for :meth:`.KVStore.set_optimizer`. The current options of an instance of
            ``torch.optim`` apply in each step, so torch's learning rate schedulers work.
        optimizer_params: the options of an optimizer given by name or class.
        kvstore: a store or its name; None to update without a store. A name does not create a store
            for one device of one process.
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
        self._base_specs: _Specs = (
            [] if self._torch else [(spec_of(optimizer, optimizer_params), ())]
        )
        self._base_specs = self._specs(1)  # checks them
        self._store, self.update_on_kvstore = _store(kvstore, self._params, update_on_kvstore)
        if self._store is not None and compression_params is not None:
            self._store.set_gradient_compression(compression_params)
        self._updaters: dict[tuple[int, int], Updater] = {}  # by parameter and replica
        self._sent: _Specs = []  # the optimizers sent last by this worker
        self._changes = 0
        self._batch_size = 0.0  # their divisor
        self._begun = False

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
            KVStoreError: The servers update the weights, so they keep no sums.
        """
        self._require_local_update("allreduce_grads")
        keys = self._ready(ignore_stale_grad)
        if self._store is not None:
            self._push_pull(keys, [_gradients(self._params[k]) for k in keys])

    @torch.no_grad()
    def update(self, batch_size: float, ignore_stale_grad: bool = False) -> None:
        """Update the weights on this worker, with the current gradients.

        Raises:
            KVStoreError: The servers update the weights.
        """
        self._require_local_update("update")
        keys = self._ready(ignore_stale_grad)
        specs = {k: spec for spec, ks in self._specs(batch_size) for k in ks or keys}
        for k in keys:
            for i, w in enumerate(self._params[k]):
                value = w.detach().reshape(-1)
                updater = self._updaters.get((k, i)) or Updater(specs[k], value)
                self._updaters[k, i] = updater = updater.follow(specs[k], value)
                assert w.grad is not None
                w.copy_(updater.update(value, w.grad.reshape(-1)).view_as(w))

    def _specs(self, batch_size: float) -> _Specs:
        """Return the optimizers of this step, with their current options."""
        specs = self._base_specs
        if self._torch is not None:
            index = {id(w): k for k, ws in enumerate(self._params) for w in ws}
            groups = groups_of(self._torch)
            indices = [tuple(index[id(p)] for p in ps if id(p) in index) for _, ps in groups]
            single = not groups[1:]
            specs = [(s, () if single else ks) for (s, _), ks in zip(groups, indices, strict=True)]
        return [(spec.divided(batch_size), ks) for spec, ks in specs]

    def _push_pull(self, keys: list[int], outs: Any) -> None:
        """Push and pull in layer order, because forward needs the first layers first."""
        assert self._store is not None
        grads: Any = [_gradients(self._params[k]) for k in keys]
        self._store.pushpull(list(keys), grads, outs)

    def _ready(self, ignore_stale_grad: bool) -> list[int]:
        """Return the parameters with gradients; the first call sets the weights to worker 0's."""
        grads = [[w.grad for w in replicas] for replicas in self._params]
        ready = [k for k, replicas in enumerate(grads) if all(g is not None for g in replicas)]
        if len(ready) < len(self._params) and not ignore_stale_grad:
            missing = [k for k in range(len(self._params)) if k not in ready]
            raise KVStoreError(
                f"parameters {missing} have no gradient. "
                "Call backward() before each step, freeze these parameters, or use "
                "ignore_stale_grad=True."
            )
        if self._store is not None and not self._begun:
            keys: Any = list(range(len(self._params)))
            self._store.init(keys, [replicas[0] for replicas in self._params])
            self._store.pull(keys, self._params)
        self._begun = True
        return ready

    def _require_local_update(self, method: str) -> None:
        if self.update_on_kvstore:
            raise KVStoreError(
                f"{method} with update_on_kvstore=True: the servers update the weights. Use step, "
                "or update_on_kvstore=False."
            )

    # -- the optimizers of the servers ------------------------------------------

    def _send_optimizers(self, specs: _Specs, batch_size: float) -> None:
        """Send these optimizers to the servers if they differ from the previous ones.

        No barrier is needed, because servers ignore a change that arrives after another worker's
        later one.
        """
        assert self._store is not None
        if self._batch_size not in (0, batch_size) and "dist" in self._store.type:
            raise KVStoreError(
                f"step({batch_size:g}), but the servers have divided by {self._batch_size:g} since "
                "the first step. Pass the same batch_size, or use update_on_kvstore=False."
            )
        if specs != self._sent:
            for spec, keys in specs:
                self._store._set_optimizer(spec, keys, self._changes)
            self._sent, self._batch_size = specs, batch_size
            self._changes += 1

    # -- the learning rate --------------------------------------------------------

    @property
    def optimizer(self) -> OptimizerSpec | torch.optim.Optimizer:
        """The ``torch.optim`` instance passed, or the specification of another optimizer."""
        return self._base_specs[0][0] if self._torch is None else self._torch

    @property
    def learning_rate(self) -> float:
        """The step size of the next step."""
        return float(self._specs(1)[0][0].group["lr"])

    def set_learning_rate(self, lr: float) -> None:
        """Set the step size from the next step; every worker must call it at the same step."""
        if self._torch is not None:
            for group in self._torch.param_groups:
                group["lr"] = lr
            return
        self._base_specs = [(spec_of(self._base_specs[0][0], {"lr": lr}), ())]


def _replicas(params: Iterable[Any] | Mapping[str, Any]) -> list[list[Tensor]]:
    """Return the replicas of each trainable parameter, without duplicates."""
    parameters = (
        [params[k] for k in sorted(params)] if isinstance(params, Mapping) else list(params)
    )
    trainable: dict[int, list[Tensor]] = {}
    for p in parameters:
        replicas = list(p) if isinstance(p, (list, tuple)) else [p]
        if not all(isinstance(w, torch.Tensor) for w in replicas) or not replicas:
            raise KVStoreError(
                f"Trainer got a {type(p).__name__} as a parameter. Pass model.parameters()."
            )
        if replicas[0].requires_grad:
            trainable.setdefault(id(replicas[0]), replicas)
    if not trainable:
        raise KVStoreError("Trainer got no parameters to train. Pass model.parameters().")
    return list(trainable.values())


def _gradients(replicas: Sequence[Tensor]) -> list[Tensor]:
    return [w.grad for w in replicas if w.grad is not None]


def _store(
    kvstore: KVStore | str | None, params: list[list[Tensor]], update: bool | None
) -> tuple[KVStore | None, bool]:
    """Return the store, and whether its servers update.

    A name does not create a store for one device of one process, unless ``update`` is True.
    """
    if isinstance(kvstore, str):
        store = create(kvstore)
        is_single = "dist" not in store.type and len(params[0]) == 1
        kvstore = None if is_single and not update else store
    if kvstore is None:
        return None, False
    if not isinstance(kvstore, KVStore):
        raise KVStoreError(f"Trainer got kvstore={kvstore!r:.60}. Pass a name, a store, or None.")
    if "async" in kvstore.type and update is False:
        raise KVStoreError(
            f'update_on_kvstore=False with "{kvstore.type}", which has no sum of all '
            "gradients to pull. Let the servers update the weights, or use dist_sync."
        )
    return kvstore, update is not False
