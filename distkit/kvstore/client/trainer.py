"""Trains torch models through a KVStore, like Gluon's ``Trainer``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from distkit.errors import KVStoreError
from distkit.kvstore.client.worker import KVStore, create
from distkit.kvstore.protocol.optimizer import Updater, spec_of


class Trainer:
    """Updates every parameter with the gradients of all workers and devices.

    With ``update_on_kvstore=True`` the servers update the weights: each step pushes gradients and
    pulls weights, which overwrite local changes. With ``False`` the servers only add: each step
    pushes gradients and pulls their sum, and every worker makes the same update. Both lead to the
    same weights.

    Args:
        params: the parameters; for several devices, a list of replicas per parameter. Key ``i`` of
            the store is the i-th parameter that requires a gradient.
        optimizer: as for :meth:`.KVStore.set_optimizer`.
        optimizer_params: the options of an optimizer given by name or class.
        kvstore: a store or its name.
        update_on_kvstore: whether the servers update the weights.

    Raises:
        KVStoreError: The optimizer is unknown, there are no parameters to train, or
            ``update_on_kvstore`` is False with dist_async, which has no sum of all gradients.

    Example, on a worker::

        trainer = kvstore.Trainer(net.parameters(), "sgd", {"learning_rate": 0.1}, "dist_sync")
        loss(net(inputs), targets).backward()
        trainer.step(batch_size=4)  # four workers, each with a mean loss

    Source: Apache MXNet, ``gluon.Trainer``.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer: Any = "sgd",
        optimizer_params: Mapping[str, Any] | None = None,
        kvstore: KVStore | str = "dist_sync",
        *,
        update_on_kvstore: bool = True,
    ) -> None:
        self._params = _replicas(params)
        self._keys: Any = list(range(len(self._params)))
        self._spec = spec_of(optimizer, optimizer_params)
        self._store = create(kvstore) if isinstance(kvstore, str) else kvstore
        if "async" in self._store.type and not update_on_kvstore:
            raise KVStoreError(
                f'update_on_kvstore=False needs a sum of all gradients, which "{self._store.type}" '
                "does not have. Let the servers update the weights, or use dist_sync."
            )
        self.update_on_kvstore = update_on_kvstore
        self._updaters: list[tuple[Tensor, Updater]] = []  # the weights of all replicas
        self._batch_size: float | None = None

    def step(self, batch_size: float) -> None:
        """Update every parameter; call it after ``backward`` instead of ``optimizer.step()``.

        Args:
            batch_size: the divisor of the sum of all gradients. If the loss is a sum over
                examples, pass the number of examples on all workers and devices; if it is a mean,
                pass the number of workers times the number of devices per worker.

        Raises:
            KVStoreError: A parameter has no gradient, or ``batch_size`` changes.
        """
        gradients = self._gradients()
        if batch_size != self._batch_size:
            self._begin(batch_size)
        # in layer order, because the forward pass needs the first layers first
        outs: Any = self._params if self.update_on_kvstore else gradients
        self._store.pushpull(self._keys, gradients, outs)
        if not self.update_on_kvstore:
            self._update(gradients)

    def _gradients(self) -> list[list[Tensor]]:
        """Return the gradients of each parameter's replicas."""
        gradients = [[w.grad for w in ws if w.grad is not None] for ws in self._params]
        missing = [k for k, ws in enumerate(self._params) if len(gradients[k]) < len(ws)]
        if missing:
            raise KVStoreError(
                f"parameters without a gradient: {missing}. "
                "Call backward() before each step, or freeze these parameters."
            )
        return gradients

    def _begin(self, batch_size: float) -> None:
        """Before the first step, set the weights of all workers to those of worker 0."""
        if self._batch_size is not None:
            raise KVStoreError(
                f"step({batch_size:g}) follows step({self._batch_size:g}), but the divisor of the "
                "gradients is fixed. Pass the same batch_size in every step."
            )
        self._batch_size, spec = batch_size, self._spec.divided(batch_size)
        self._store.init(self._keys, [replicas[0] for replicas in self._params])
        self._store.pull(self._keys, self._params)
        if self.update_on_kvstore:
            self._store.set_optimizer(spec)
            return
        weights = chain.from_iterable(self._params)
        self._updaters = [(w, Updater(spec, w.detach().reshape(-1))) for w in weights]

    @torch.no_grad()
    def _update(self, gradients: list[list[Tensor]]) -> None:
        """Update the weights on this worker."""
        for (w, updater), g in zip(self._updaters, chain.from_iterable(gradients), strict=True):
            w.copy_(updater.update(w.detach().reshape(-1), g.reshape(-1)).view_as(w))


def _replicas(params: Iterable[Any]) -> list[list[Tensor]]:
    """Return the replicas of each trainable parameter, without duplicates."""
    trainable: dict[int, list[Tensor]] = {}
    for p in params:
        replicas = list(p) if isinstance(p, (list, tuple)) else [p]
        if not all(isinstance(w, torch.Tensor) for w in replicas) or not replicas:
            raise KVStoreError(
                f"Trainer got a parameter of type {type(p).__name__}. Pass model.parameters()."
            )
        if replicas[0].requires_grad:
            trainable.setdefault(id(replicas[0]), replicas)
    if not trainable:
        raise KVStoreError("Trainer got no parameters to train. Pass model.parameters().")
    return list(trainable.values())
