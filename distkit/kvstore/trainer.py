"""Training a torch model through a KVStore, as Gluon's ``Trainer`` does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from distkit.errors import KVStoreError
from distkit.kvstore import states
from distkit.kvstore.optimizer import SGD, SLOTS, Slots, make, to_spec

if TYPE_CHECKING:
    from torch import Tensor

    from distkit.kvstore.worker import KVStore


class Trainer:
    """Makes a step of every parameter from the gradients of all workers and devices.

    Either the servers update the weights (``update_on_kvstore=True``): each step pushes
    gradients and pulls weights. Or they only add (``False``): each step pushes gradients, pulls
    their sum, and every worker does the same update. Both give the same weights.

    Args:
        params: the parameters; several devices: for each parameter a list of its replicas; or
            a dict of either, taken in the order of its keys. Key ``i`` of the store is the i-th.
        optimizer: "sgd", or ``kvstore.SGD(...)``.
        optimizer_params: its options, if it is given by name.
        kvstore: a store, or the name to create one by; None to update without one.
        compression_params: see :meth:`.KVStore.set_gradient_compression`.
        update_on_kvstore: None for True in a distributed store, and else False.

    Raises:
        KVStoreError: no such optimizer; ``update_on_kvstore=False`` with dist_async, where there
            is no sum of all gradients.

    >>> net = torch.nn.Linear(2, 1)
    >>> trainer = Trainer(net.parameters(), "sgd", {"learning_rate": 0.1})
    >>> net(torch.ones(4, 2)).sum().backward()
    >>> trainer.step(batch_size=4)

    Source: Apache MXNet, ``gluon.Trainer``.
    """

    def __init__(
        self, params: Iterable[Any] | Mapping[str, Any], optimizer: str | SGD = "sgd",
        optimizer_params: Mapping[str, Any] | None = None, kvstore: KVStore | str | None = "device",
        *, compression_params: Mapping[str, Any] | None = None,
        update_on_kvstore: bool | None = None,
    ) -> None:  # fmt: skip
        self._params = _replicas(params)
        self._rule = _optimizer(optimizer, optimizer_params)
        self._scale = self._rule.rescale_grad
        self._store = _store(kvstore)
        distributed = self._store is not None and self._store.type.startswith("dist")
        self.update_on_kvstore = distributed if update_on_kvstore is None else update_on_kvstore
        if self._store is None:
            self.update_on_kvstore = False
        elif "async" in self._store.type and not self.update_on_kvstore:
            raise KVStoreError(
                f'update_on_kvstore=False with "{self._store.type}": there is no sum of all '
                "gradients to pull. Let the servers update, or use dist_sync."
            )
        if self._store is not None and compression_params is not None:
            self._store.set_gradient_compression(compression_params)
        self._slots = [[Slots() for _ in replicas] for replicas in self._params]
        self._begun = False
        self._batch_size: float | None = None  # of the first step

    # -- one step ---------------------------------------------------------------

    def step(self, batch_size: float, ignore_stale_grad: bool = False) -> None:
        """Update every parameter; call it after ``backward``, in place of ``optimizer.step()``.

        Args:
            batch_size: what the sum of all gradients is divided by: the number of examples of
                all workers and devices if the loss is a sum over examples, the number of
                workers times devices if it is a mean.
            ignore_stale_grad: leave parameters alone that have no gradient, instead of refusing;
                under dist_sync they must be the same on all workers.

        Raises:
            KVStoreError: a parameter has no gradient, or the servers' ``batch_size`` would change.
        """
        self._begin(batch_size)
        if self.update_on_kvstore:
            keys = self._ready(ignore_stale_grad)
            self._push_pull(keys, [self._params[k] for k in keys])
        else:
            self.allreduce_grads(ignore_stale_grad)
            self.update(batch_size, ignore_stale_grad)

    def allreduce_grads(self, ignore_stale_grad: bool = False) -> None:
        """Replace each gradient by the sum over workers and devices, to look at it or clip it.

        Raises:
            KVStoreError: the servers update, so that there is no sum to get.
        """
        self._updates_here("allreduce_grads")
        self._begin(None)
        if self._store is None:
            return
        keys = self._ready(ignore_stale_grad)
        self._push_pull(keys, [_gradients(self._params[k]) for k in keys])

    def update(self, batch_size: float, ignore_stale_grad: bool = False) -> None:
        """Update the weights here, with the gradients as they are.

        Raises:
            KVStoreError: the servers update.
        """
        self._updates_here("update")
        rule = replace(self._rule, rescale_grad=self._scale / batch_size)
        with torch.no_grad():
            for k in self._ready(ignore_stale_grad):
                for i, w in enumerate(self._params[k]):
                    assert w.grad is not None
                    value, self._slots[k][i] = rule.apply(w.data, w.grad, self._slots[k][i])
                    w.copy_(value)

    def _begin(self, batch_size: float | None) -> None:
        """Before the first step: worker 0's weights for all, and the servers' optimizer."""
        if self._begun and batch_size == self._batch_size:
            return
        store = self._store
        rule = self._rule if batch_size is None else replace(
            self._rule, rescale_grad=self._scale / batch_size
        )  # fmt: skip
        if self._begun:
            if self.update_on_kvstore and rule != self._rule:
                raise KVStoreError(
                    f"step({batch_size:g}), but the servers divide by "
                    f"{self._scale / self._rule.rescale_grad:g} since the first step. Give the "
                    "same batch_size, or use update_on_kvstore=False."
                )
            return
        self._begun, self._batch_size = True, batch_size
        if store is None:
            return
        if self.update_on_kvstore:
            self._rule = rule
            store.set_optimizer(rule)
        keys = list(range(len(self._params)))
        store.init(keys, [replicas[0] for replicas in self._params])
        self._pull_weights(keys)

    def _push_pull(self, keys: list[int], outs: Any) -> None:
        """The first layers go first: the next forward pass needs their weights first."""
        assert self._store is not None
        grads: Any = [_gradients(self._params[k]) for k in keys]
        self._store.pushpull(keys, grads, outs, [-k for k in keys])

    def _pull_weights(self, keys: list[int]) -> None:
        assert self._store is not None
        outs: Any = [self._params[k] for k in keys]
        self._store.pull(keys, outs, [-k for k in keys])

    def _ready(self, ignore_stale_grad: bool) -> list[int]:
        """The parameters that have gradients."""
        stale = [k for k, replicas in enumerate(self._params)
                 if any(w.grad is None for w in replicas)]  # fmt: skip
        if stale and not ignore_stale_grad:
            raise KVStoreError(
                f"parameters {stale} have no gradient. Call backward() first, freeze them, or "
                "use ignore_stale_grad=True."
            )
        return [k for k in range(len(self._params)) if k not in set(stale)]

    def _updates_here(self, what: str) -> None:
        if self.update_on_kvstore:
            raise KVStoreError(
                f"{what} with update_on_kvstore=True: the servers update. Use step, or "
                "update_on_kvstore=False."
            )

    # -- learning rate and states -----------------------------------------------

    @property
    def learning_rate(self) -> float:
        """The step size."""
        return self._rule.learning_rate

    def set_learning_rate(self, lr: float) -> None:
        """Change the step size from the next step on; every worker calls it, at the same step."""
        self._rule = replace(self._rule, learning_rate=lr)
        if self._begun and self.update_on_kvstore and self._store is not None:
            self._store.barrier()
            self._store.set_optimizer(self._rule, anew=True)
            self._store.barrier()

    def save_states(self, fname: str) -> None:
        """Save what the optimizer keeps: the servers' if they update, else this worker's."""
        if self.update_on_kvstore:
            assert self._store is not None
            self._store.save_optimizer_states(fname, dump_optimizer=True)
            return
        found: states.States = {
            (k, slot): kept.flatten().cpu()
            for k, slots in enumerate(self._slots) for slot in SLOTS
            if (kept := getattr(slots[0], slot)) is not None
        }  # fmt: skip
        states.write(fname, found, to_spec(self._rule))

    def load_states(self, fname: str) -> None:
        """Load what :meth:`save_states` saved, on one worker if the servers update, else on all.

        Raises:
            KVStoreError: no such file, or not of these parameters.
        """
        if self.update_on_kvstore:
            assert self._store is not None
            self._store.load_optimizer_states(fname)
            return
        for (k, slot), kept in states.read(fname)[0].items():
            if not (isinstance(k, int) and k < len(self._params)
                    and kept.numel() == self._params[k][0].numel()):  # fmt: skip
                raise KVStoreError(f"{fname} has the states of other parameters: its {k!r} has "
                                   f"{kept.numel()} elements.")  # fmt: skip
            for i, w in enumerate(self._params[k]):
                here = kept.view(w.shape).to(w.device)
                self._slots[k][i] = replace(self._slots[k][i], **{slot: here})


def _replicas(params: Iterable[Any] | Mapping[str, Any]) -> list[list[Tensor]]:
    """For each parameter that is trained its replicas, each parameter once."""
    given = [params[k] for k in sorted(params)] if isinstance(params, Mapping) else list(params)
    found: dict[int, list[Tensor]] = {}
    for p in given:
        replicas = list(p) if isinstance(p, (list, tuple)) else [p]
        if not all(isinstance(w, torch.Tensor) for w in replicas) or not replicas:
            raise KVStoreError(f"Trainer got a {type(p).__name__} among its parameters. "
                               "Give model.parameters().")  # fmt: skip
        if replicas[0].requires_grad:
            found.setdefault(id(replicas[0]), replicas)
    if not found:
        raise KVStoreError("Trainer without a parameter to train. Give model.parameters().")
    return list(found.values())


def _gradients(replicas: Sequence[Tensor]) -> list[Tensor]:
    return [w.grad for w in replicas if w.grad is not None]


def _optimizer(optimizer: str | SGD, params: Mapping[str, Any] | None) -> SGD:
    if isinstance(optimizer, str):
        return make(optimizer, dict(params or {}))
    if params:
        raise KVStoreError("optimizer_params beside an optimizer that has them. Give one.")
    to_spec(optimizer)  # refuses what servers do not know
    return optimizer


def _store(kvstore: KVStore | str | None) -> KVStore | None:
    if not isinstance(kvstore, str):
        return kvstore
    from distkit import kvstore as stores

    return stores.create(kvstore)
