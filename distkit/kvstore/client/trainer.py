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
        params: the parameters; for several devices a list of replicas per parameter. Key ``i`` of
            the store is the i-th parameter.
        optimizer: as for :meth:`.KVStore.set_optimizer`. The current options of an instance of
            ``torch.optim`` apply in each step, so torch's learning rate schedulers work.
        optimizer_params: the options of an optimizer given by name or class.
        kvstore: a store or its name; None to update without a store. A name does not create a store
            for one device of one process.
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
        params: Iterable[Any],
        optimizer: Any = "sgd",
        optimizer_params: Mapping[str, Any] | None = None,
        kvstore: KVStore | str | None = "device",
        *,
        update_on_kvstore: bool | None = None,
    ) -> None:
        self._params = _replicas(params)
        self._index = {id(w): k for k, replicas in enumerate(self._params) for w in replicas}
        is_instance = isinstance(optimizer, torch.optim.Optimizer)
        self._optimizer = optimizer if is_instance else spec_of(optimizer, optimizer_params)
        self._specs(1)  # checks the optimizer
        self._store, self.update_on_kvstore = _store(kvstore, self._params, update_on_kvstore)
        self._updaters: dict[tuple[int, int], Updater] = {}  # by parameter and replica
        self._sent: _Specs = []  # the optimizers sent last by this worker
        self._changes = 0
        self._batch_size = 0.0  # their divisor
        self._begun = False

    def step(self, batch_size: float) -> None:
        """Update every parameter; call it after ``backward`` instead of ``optimizer.step()``.

        Args:
            batch_size: the divisor of the sum of all gradients: the number of examples of all
                workers and devices if the loss is a sum over examples, the number of workers
                times devices if it is a mean.

        Raises:
            KVStoreError: A parameter has no gradient, or the servers' ``batch_size`` would change.
        """
        gradients = self._gradients()
        specs = self._specs(batch_size)
        if self._store is not None:
            self._begin()
            if self.update_on_kvstore:
                self._send_optimizers(specs, batch_size)
            # in layer order, because forward needs the first layers first
            keys: Any = list(range(len(self._params)))
            outs: Any = self._params if self.update_on_kvstore else gradients
            self._store.pushpull(keys, gradients, outs)
        if not self.update_on_kvstore:
            self._update(specs, gradients)

    def _gradients(self) -> list[list[Tensor]]:
        """Return the gradients of each parameter's replicas."""
        gradients = [[w.grad for w in ws if w.grad is not None] for ws in self._params]
        missing = [k for k, ws in enumerate(self._params) if len(gradients[k]) < len(ws)]
        if missing:
            raise KVStoreError(
                f"parameters {missing} have no gradient. "
                "Call backward() before each step, or freeze these parameters."
            )
        return gradients

    def _begin(self) -> None:
        """Before the first step, set the weights of all workers to worker 0's."""
        if not self._begun and self._store is not None:
            keys: Any = list(range(len(self._params)))
            self._store.init(keys, [replicas[0] for replicas in self._params])
            self._store.pull(keys, self._params)
            self._begun = True

    @torch.no_grad()
    def _update(self, specs: _Specs, gradients: list[list[Tensor]]) -> None:
        """Update the weights on this worker."""
        everything = range(len(self._params))
        spec_by_key = {k: spec for spec, keys in specs for k in keys or everything}
        for k, replicas in enumerate(self._params):
            for i, (w, g) in enumerate(zip(replicas, gradients[k], strict=True)):
                value = w.detach().reshape(-1)
                updater = self._updaters.get((k, i)) or Updater(spec_by_key[k], value)
                self._updaters[k, i] = updater = updater.follow(spec_by_key[k], value)
                w.copy_(updater.update(value, g.reshape(-1)).view_as(w))

    def _specs(self, batch_size: float) -> _Specs:
        """Return the optimizers of this step, with their current options."""
        if isinstance(self._optimizer, OptimizerSpec):
            return [(self._optimizer.divided(batch_size), ())]
        groups = groups_of(self._optimizer)
        specs: _Specs = []
        for spec, parameters in groups:
            keys = tuple(self._index[id(p)] for p in parameters if id(p) in self._index)
            specs.append((spec.divided(batch_size), keys if len(groups) > 1 else ()))
        return specs

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


def _replicas(params: Iterable[Any]) -> list[list[Tensor]]:
    """Return the replicas of each trainable parameter, without duplicates."""
    trainable: dict[int, list[Tensor]] = {}
    for p in params:
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


def _store(
    kvstore: KVStore | str | None, params: Sequence[Sequence[Tensor]], update: bool | None
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
