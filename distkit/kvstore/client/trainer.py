"""Training a torch model through a KVStore, as Gluon's ``Trainer`` does."""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distkit.errors import KVStoreError
from distkit.kvstore.client import states
from distkit.kvstore.client.base import KVStoreBase
from distkit.kvstore.client.create import create
from distkit.kvstore.client.worker import KVStore
from distkit.kvstore.protocol.messages import COUNT, Key
from distkit.kvstore.protocol.optimizer import (
    Optimizer,
    State,
    Turn,
    from_spec,
    from_torch,
    rule_of,
    to_spec,
)

#: MXNet's: a "local" store with a larger parameter leaves the update to the worker.
_LARGE = 1 << 24


class Trainer:
    """Makes a step of every parameter from the gradients of all workers and devices.

    Either the servers update the weights (``update_on_kvstore=True``): each step pushes
    gradients and pulls weights. Or they only add (``False``): each step pushes gradients, pulls
    their sum, and every worker does the same update. Both give the same weights.

    Args:
        params: the parameters; several devices: for each parameter a list of its replicas; or
            a dict of either, taken in the order of its keys. Key ``i`` of the store is the i-th.
            A parameter's ``lr_mult`` and ``wd_mult``, if it has such attributes, multiply its
            learning rate and weight decay.
        optimizer: a name such as "sgd" or "adam" (see
            :mod:`distkit.kvstore.protocol.optimizer`), a rule
            such as ``kvstore.SGD(...)``, or a class or an instance of ``torch.optim``. Of an
            instance its present learning rate counts, so that torch's schedulers work.
        optimizer_params: its options, if it is given by name or class.
        kvstore: a store, or the name to create one by; None to update without one. By name there
            is none for one device of one process.
        compression_params: see :meth:`.KVStore.set_gradient_compression`.
        update_on_kvstore: None for True where there is a store that can.

    Raises:
        KVStoreError: no such optimizer; ``update_on_kvstore=False`` with dist_async, where there
            is no sum of all gradients, or ``True`` with a store that cannot update.

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
        kvstore: KVStoreBase | str | None = "device",
        *,
        compression_params: Mapping[str, Any] | None = None,
        update_on_kvstore: bool | None = None,
    ) -> None:
        self._params = _replicas(params)
        self._keys = {id(w): k for k, replicas in enumerate(self._params) for w in replicas}
        self._torch = optimizer if isinstance(optimizer, torch.optim.Optimizer) else None
        self._rule = self._first_rule(optimizer, optimizer_params)
        self._scale = self._rule.rescale_grad
        self._store = _store(kvstore, self._params, update_on_kvstore)
        self.update_on_kvstore = _where(self._store, kvstore, self._params, update_on_kvstore)
        self._distributed = self._store is not None and "dist" in self._store.type
        if isinstance(self._store, KVStore) and compression_params is not None:
            self._store.set_gradient_compression(compression_params)
        self._slots: list[list[State]] = [[{} for _ in replicas] for replicas in self._params]
        self._counts = [0] * len(self._params)
        self._steps = 0  # the most that a parameter has made
        self._made: tuple[Optimizer, Any, Optimizer] | None = None  # of what, and the last rule
        self._sent: Optimizer | None = None  # what the servers have
        self._fixed = False  # whether they know by what they divide
        self._loaded: states.States = {}  # for the servers, before the first step
        self._begun = self._warned = False
        self._grads: dict[int, Any] = {}  # by id of a parameter: its gradient of the last step
        self._weights: dict[int, int] = {}  # and which version of the weight it was left with

    def _first_rule(self, optimizer: Any, params: Mapping[str, Any] | None) -> Optimizer:
        if self._torch is None or self._torch.state:
            return rule_of(optimizer, params)
        return from_torch(self._torch, self._keys, **(params or {}))

    # -- one step ---------------------------------------------------------------

    def step(self, batch_size: float, ignore_stale_grad: bool = False) -> None:
        """Update every parameter; call it after ``backward``, in place of ``optimizer.step()``.

        Args:
            batch_size: what the sum of all gradients is divided by: the number of examples of
                all workers and devices if the loss is a sum over examples, the number of
                workers times devices if it is a mean.
            ignore_stale_grad: leave parameters alone whose gradient no ``backward`` has made since
                the last step, instead of refusing; under dist_sync they must be the same on all
                workers.

        Raises:
            KVStoreError: a parameter has no new gradient, the servers' ``batch_size`` would
                change, or weights were changed that the servers hold.
        """
        rule = self._rule_for(batch_size)
        keys = self._ready(ignore_stale_grad)
        self._begin(rule)
        if self.update_on_kvstore:
            self._tell(rule, batch_size)
            self._fixed = True
            self._take_over()
            self._push_pull(keys, [self._params[k] for k in keys])
        else:
            if self._store is not None:
                self._push_pull(keys, [_gradients(self._params[k]) for k in keys])
            self._update(rule, keys)
        self._done(keys)

    def allreduce_grads(self, ignore_stale_grad: bool = False) -> None:
        """Replace each gradient by the sum over workers and devices, to look at it or clip it.

        Raises:
            KVStoreError: the servers update, so that there is no sum to get.
        """
        self._updates_here("allreduce_grads")
        keys = self._ready(ignore_stale_grad)
        self._begin(self._rule_for(None))
        if self._store is not None:
            self._push_pull(keys, [_gradients(self._params[k]) for k in keys])

    def update(self, batch_size: float, ignore_stale_grad: bool = False) -> None:
        """Update the weights here, with the gradients as they are.

        Raises:
            KVStoreError: the servers update.
        """
        self._updates_here("update")
        keys = self._ready(ignore_stale_grad)
        self._begin(self._rule_for(batch_size))
        self._update(self._rule_for(batch_size), keys)
        self._done(keys)

    def _update(self, rule: Optimizer, keys: list[int]) -> None:
        with torch.no_grad():
            for k in keys:
                self._counts[k] += 1
                turn = Turn(k, self._counts[k], max(self._counts))
                for i, w in enumerate(self._params[k]):
                    assert w.grad is not None
                    value, self._slots[k][i] = rule.apply(w.data, w.grad, self._slots[k][i], turn)
                    w.copy_(value)

    def _begin(self, rule: Optimizer) -> None:
        """Before the first step: worker 0's weights for all, and the servers' optimizer."""
        store = self._store
        if self._begun or store is None:
            return
        self._begun = True
        if self.update_on_kvstore:
            store.set_optimizer(rule)
            self._sent = rule
        keys = list(range(len(self._params)))
        if isinstance(store, KVStore):
            store.init(keys, [replicas[0] for replicas in self._params])
            self._pull_weights(keys)
            store._set_states(self._loaded)
        else:
            for k, replicas in ((k, [w.detach() for w in self._params[k]]) for k in keys):
                store.broadcast(k, replicas[0], replicas, priority=-k)
        self._note_weights()

    def _push_pull(self, keys: list[int], outs: Any) -> None:
        """The first layers go first: the next forward pass needs their weights first."""
        assert self._store is not None
        grads: Any = [_gradients(self._params[k]) for k in keys]
        if isinstance(self._store, KVStore):
            self._store.pushpull(keys, grads, outs, [-k for k in keys])
            return
        for k, mine, out in zip(keys, grads, outs, strict=True):
            self._store.pushpull(k, mine, out, priority=-k)

    def _pull_weights(self, keys: list[int]) -> None:
        assert isinstance(self._store, KVStore)
        outs: Any = [self._params[k] for k in keys]
        self._store.pull(keys, outs, [-k for k in keys])

    def _ready(self, ignore_stale_grad: bool) -> list[int]:
        """The parameters that have gradients that no step has used."""
        without, stale = [], []
        for k, replicas in enumerate(self._params):
            for w in replicas:
                if (grad := w.grad) is None:
                    without.append(k)
                    break
                of, version = self._grads.get(id(w), (None, -1))
                if of is not None and version == grad._version and of() is grad:
                    stale.append(k)
                    break
        if not without and not stale:
            return list(range(len(self._params)))
        for keys, what in (
            (without, "have no gradient. Call backward() first"),
            (
                stale,
                "have the gradient of the last step: no backward() has changed it since. "
                "Call backward() before each step",
            ),
        ):
            if keys and not ignore_stale_grad:
                raise KVStoreError(
                    f"parameters {keys} {what}, freeze them, or use ignore_stale_grad=True."
                )
        left_out = {*without, *stale}
        return [k for k in range(len(self._params)) if k not in left_out]

    def _done(self, keys: list[int]) -> None:
        """Note what these parameters' gradients and weights are after a step."""
        self._steps += 1
        for w in (w for k in keys for w in self._params[k]):
            grad = w.grad
            assert grad is not None
            self._grads[id(w)] = weakref.ref(grad), grad._version
        self._note_weights()

    def _note_weights(self) -> None:
        if self.update_on_kvstore:
            self._weights = {id(w): w._version for replicas in self._params for w in replicas}

    def _updates_here(self, what: str) -> None:
        if self.update_on_kvstore:
            raise KVStoreError(
                f"{what} with update_on_kvstore=True: the servers update. Use step, or "
                "update_on_kvstore=False."
            )

    # -- what the servers hold --------------------------------------------------

    def _rule_for(self, batch_size: float | None) -> Optimizer:
        """The rule of this step: its options as they are now."""
        scale = self._scale / batch_size if batch_size is not None else self._rescale
        rates = [(g["lr"], g.get("weight_decay")) for g in self._groups]
        lr, wd = self._factors("lr_mult"), self._factors("wd_mult")
        of = scale, rates, lr, wd
        if self._made is None or self._made[0] is not self._rule or self._made[1] != of:
            rule = self._rule
            if self._torch is not None:
                now = from_torch(self._torch, self._keys)
                rule = replace(
                    rule,
                    learning_rate=now.learning_rate,
                    wd=now.wd,
                    lr_mult=now.lr_mult,
                    wd_mult=now.wd_mult,
                )
            rule = replace(
                rule,
                rescale_grad=scale,
                lr_mult={**rule.lr_mult, **lr},
                wd_mult={**rule.wd_mult, **wd},
            )
            self._made = self._rule, of, rule
        return self._made[2]

    def _factors(self, mult: str) -> dict[Key, float]:
        """Those that parameters have as attributes."""
        return {
            k: float(vars(replicas[0])[mult])
            for k, replicas in enumerate(self._params)
            if mult in vars(replicas[0])
        }

    @property
    def _rescale(self) -> float:
        """The current factor of gradients."""
        return self._scale if self._made is None else self._made[2].rescale_grad

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return [] if self._torch is None else self._torch.param_groups

    def _tell(self, rule: Optimizer, batch_size: float | None = None) -> None:
        """Let the servers have this rule.

        No barrier is needed: of synchronous workers each has pulled what came of the last round,
        and the next is complete only when all have told.
        """
        if rule is self._sent or rule == self._sent:
            return
        assert self._store is not None and self._sent is not None
        changes = rule.rescale_grad != self._sent.rescale_grad
        if changes and self._fixed and self._distributed:
            raise KVStoreError(
                f"step({batch_size:g}), but the servers divide by "
                f"{self._scale / self._sent.rescale_grad:g} since the first step. Give the "
                "same batch_size, or use update_on_kvstore=False."
            )
        assert isinstance(self._store, KVStore)
        self._store.set_optimizer(rule, anew=True)
        self._sent = rule

    def _take_over(self) -> None:
        """Weights that were changed since the last step: the store has others."""
        changed = {
            k: w
            for k, replicas in enumerate(self._params)
            for w in replicas
            if self._weights.get(id(w)) != w._version
        }
        if not changed or not isinstance(self._store, KVStore):
            return
        if not self._distributed:
            for k, w in changed.items():
                self._store._assign(k, w)
        elif "async" not in self._store.type:
            held: Any = self._store.pull([*changed])
            if other := [
                k
                for (k, w), v in zip(changed.items(), held, strict=True)
                if not torch.equal(v, w.detach().cpu())
            ]:
                raise KVStoreError(self._changed(other, "Restore them"))
        elif not self._warned:
            self._warned = True
            warnings.warn(self._changed([*changed], "They are overwritten"), stacklevel=3)

    def _changed(self, keys: list[int], what: str) -> str:
        return (
            f"parameters {keys} were changed since the last step, but the servers hold the "
            f"weights. {what}: load weights before the first step, or use update_on_kvstore=False."
        )

    # -- learning rate and states -----------------------------------------------

    @property
    def optimizer(self) -> Optimizer | torch.optim.Optimizer:
        """The rule, or the optimizer of torch that it was given."""
        return self._rule if self._torch is None else self._torch

    @property
    def learning_rate(self) -> float:
        """The step size of the last step; before the first, of that."""
        if self._torch is not None:
            return float(self._groups[0]["lr"])
        return self._rule.rate(Turn("", updates=max(1, self._steps)))

    def set_learning_rate(self, lr: float) -> None:
        """Change the step size from the next step on; every worker calls it, at the same step.

        Raises:
            KVStoreError: a scheduler decides it.
        """
        if self._rule.lr_scheduler is not None:
            raise KVStoreError(
                "set_learning_rate with an lr_scheduler, which decides the rate. "
                "Leave out one of them."
            )
        for group in self._groups:
            group["lr"] = lr
        self._rule = replace(self._rule, learning_rate=lr)

    def save_states(self, fname: str | Path) -> None:
        """Save what the optimizer keeps, and its options.

        The servers' if they update, else this worker's; before the first step only the options.
        """
        rule = self._rule_for(None)
        if self.update_on_kvstore and self._begun:
            assert self._store is not None
            self._tell(rule)
            self._store.save_optimizer_states(fname, dump_optimizer=True)
            return
        found: states.States = dict(self._loaded)
        for k, slots in enumerate(self._slots):
            found |= {(k, name): kept.flatten().cpu() for name, kept in slots[0].items()}
            if self._counts[k]:
                found[k, COUNT] = torch.tensor([self._counts[k]])
        states.write(fname, found, to_spec(rule))

    def load_states(self, fname: str | Path) -> None:
        """Load what :meth:`save_states` saved, options and all; every worker calls it.

        ``lr_mult`` and ``wd_mult`` stay as they are here.

        Raises:
            KVStoreError: no such file, or not of these parameters.
        """
        found, spec = states.read(fname)
        rule = self._rule if spec is None else from_spec(*spec)
        rule = replace(rule, lr_mult=self._rule.lr_mult, wd_mult=self._rule.wd_mult)
        here = [self._found(fname, rule, k, name, kept) for (k, name), kept in found.items()]
        self._adopt(rule)
        counts = {k: int(kept) for (k, name), kept in found.items() if name == COUNT}
        self._steps = max(counts.values(), default=0)
        if self.update_on_kvstore:
            self._to_servers(found)
            return
        self._counts = [counts.get(k, 0) for k in range(len(self._params))]
        for slots in self._slots:
            slots[:] = [{} for _ in slots]
        for k, name, kept in here:
            for i, w in enumerate(self._params[k]):
                if name != COUNT:
                    self._slots[k][i][name] = kept.to(w.device, copy=True)

    def _found(
        self, fname: str | Path, rule: Optimizer, k: Any, name: str, kept: Tensor
    ) -> tuple[int, str, Tensor]:
        """A state in its shape."""
        like = None
        if isinstance(k, int) and k < len(self._params):
            w = self._params[k][0]
            like = torch.zeros(1) if name == COUNT else rule.kept(w.detach()).get(name)
        if like is None or like.numel() != kept.numel():
            raise KVStoreError(
                f"{fname} holds the states of different parameters: its {k!r} has "
                f"{kept.numel()} elements of {name}."
            )
        return k, name, kept.view(like.shape)

    def _adopt(self, rule: Optimizer) -> None:
        """Go on with an optimizer from a file."""
        now = self._rule_for(None)
        if self._torch is not None and rule.goes_on(now) and now.learning_rate:
            for group in self._groups:
                group["lr"] *= rule.learning_rate / now.learning_rate
        else:
            self._torch = None
        scale, self._rule = rule.rescale_grad, replace(rule, rescale_grad=self._scale)
        self._rule_for(self._scale / scale if scale else None)

    def _to_servers(self, found: states.States) -> None:
        if not self._begun:
            self._loaded = found
            return
        assert isinstance(self._store, KVStore)
        now = self._rule_for(None)
        self._store.set_optimizer(now, anew=True)
        self._store._set_states(found)
        self._sent, self._fixed = now, bool(found)


def _replicas(params: Iterable[Any] | Mapping[str, Any]) -> list[list[Tensor]]:
    """For each parameter that is trained its replicas, each parameter once."""
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
    kvstore: KVStoreBase | str | None, params: list[list[Tensor]], update: bool | None
) -> KVStoreBase | None:
    """The store; none by name for one device of one process, unless it is to update."""
    if isinstance(kvstore, str):
        made = create(kvstore)
        alone = isinstance(made, KVStore) and "dist" not in made.type and len(params[0]) == 1
        return None if alone and not update else made
    if kvstore is None or isinstance(kvstore, KVStoreBase):
        return kvstore
    raise KVStoreError(f"Trainer got kvstore={kvstore!r:.60}. Give a name, a store, or None.")


def _where(
    store: KVStoreBase | None, given: Any, params: list[list[Tensor]], update: bool | None
) -> bool:
    """True if the servers update."""
    if store is None:
        return False
    if "async" in store.type and update is False:
        raise KVStoreError(
            f'update_on_kvstore=False with "{store.type}": there is no sum of all '
            "gradients to pull. Let the servers update, or use dist_sync."
        )
    capable = store.is_capable(store.OPTIMIZER)
    if update and not capable:
        raise KVStoreError(
            f"update_on_kvstore=True with {store.type}, which cannot update. "
            "Use update_on_kvstore=False."
        )
    if update is not None or "async" in store.type:
        return update is not False
    large = given == "local" and max(ws[0].numel() for ws in params) > _LARGE
    return capable and not large and os.environ.get("MXNET_UPDATE_ON_KVSTORE", "1") != "0"
