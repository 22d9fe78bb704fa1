"""``Trainer``, with the semantics of Gluon's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from distkit.kvstore import KVStore, Trainer
from tests.stress.kvstore.cases.catalog import (
    assert_close,
    assert_equal,
    assert_raises_kvstore_error,
    case,
    store,
)
from tests.support.in_process import InProcess

OPTIONS = {"learning_rate": 1.0, "momentum": 0.5}


def parameter(value: float = 0.0, size: int = 10) -> torch.nn.Parameter:
    """Return a parameter filled with one value."""
    return torch.nn.Parameter(torch.full((size,), value))


def pair() -> list[torch.nn.Parameter]:
    """Return the replicas of a parameter on two devices."""
    return [parameter(), parameter()]


def backward(*parameters: torch.nn.Parameter, factor: float = 1.0) -> None:
    """Compute gradients of ``factor`` for every element."""
    for w in parameters:
        w.grad = None
        (factor * w).sum().backward()


def steps(trainer: Trainer, *parameters: torch.nn.Parameter, count: int = 1) -> None:
    """Take ``count`` steps with gradients of 1."""
    for _ in range(count):
        backward(*parameters)
        trainer.step(1)


@case(
    *(
        (kind, update_on_kvstore)
        for kind in ("dist_sync", "dist_sync_device")
        for update_on_kvstore in (True, False)
    )
)
def replicas_on_two_devices_stay_equal(kind: str, update_on_kvstore: bool) -> None:
    x = pair()
    trainer = Trainer([x], "sgd", OPTIONS, store(kind), update_on_kvstore=update_on_kvstore)
    for expected in (-2.0, -5.0):
        steps(trainer, *x)
        assert_equal(x[0].detach(), expected)
        assert_equal(x[1].detach(), expected)


@case("dist_async", "dist_async_device")
def asynchronous_stores_require_update_on_kvstore(kind: str) -> None:
    kv = InProcess(1, mode=kind).store()
    assert_raises_kvstore_error(
        lambda: Trainer([parameter()], kvstore=kv, update_on_kvstore=False), "dist_sync"
    )


def trained(
    kv: KVStore, update_on_kvstore: bool, optimizer: Any, **options: Any
) -> list[torch.Tensor]:
    """Train a small model for three steps on this worker's share of the data."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    trainer = Trainer(
        net.parameters(), optimizer, options or None, kv, update_on_kvstore=update_on_kvstore
    )
    torch.manual_seed(1)
    for x in torch.randn(3, 12, 5)[:, kv.rank :: kv.num_workers]:
        net.zero_grad()
        net(x).square().sum().backward()
        trainer.step(12)
    return [w.detach() for w in net.parameters()]


@case(
    *(
        (name, update_on_kvstore)
        for name in ("sgd", "adam", "rmsprop", "torch.optim.AdamW")
        for update_on_kvstore in (True, False)
    )
)
def training_does_not_depend_on_the_number_of_servers(name: str, update_on_kvstore: bool) -> None:
    (single,) = InProcess(1).run(lambda kv: trained(kv, update_on_kvstore, name))
    torch.manual_seed(0)
    for weights in InProcess(1, 3, bound=8).run(lambda kv: trained(kv, update_on_kvstore, name)):
        for found, expected in zip(weights, single, strict=True):
            assert_close(found, expected)


@case(*((workers, update_on_kvstore) for workers in (2, 3) for update_on_kvstore in (True, False)))
def gradients_of_all_workers_are_added(workers: int, update_on_kvstore: bool) -> None:
    def work(kv: KVStore) -> torch.Tensor:
        w = parameter()
        trainer = Trainer([w], "sgd", OPTIONS, kv, update_on_kvstore=update_on_kvstore)
        for _ in range(3):
            backward(w, factor=kv.rank + 1)
            trainer.step(workers)
        return w.detach()

    w, m = 0.0, 0.0
    for _ in range(3):
        m = 0.5 * m - (workers + 1) / 2
        w += m
    for found in InProcess(workers).run(work):
        assert_close(found, torch.full((10,), w))


@case(True, False)
def worker_0_determines_the_initial_weights(update_on_kvstore: bool) -> None:
    def work(kv: KVStore) -> torch.Tensor:
        w = parameter(10.0 * kv.rank)
        trainer = Trainer(
            [w], "sgd", {"learning_rate": 1.0}, kv, update_on_kvstore=update_on_kvstore
        )
        steps(trainer, w)
        return w.detach()

    for found in InProcess(2).run(work):
        assert_equal(found, -2)


@case(True, False)
def missing_gradients_raise(update_on_kvstore: bool) -> None:
    trainer = Trainer(
        [parameter()], "sgd", OPTIONS, store("dist_sync"), update_on_kvstore=update_on_kvstore
    )
    assert_raises_kvstore_error(partial(trainer.step, 1), "backward()", "freeze these parameters")


@case(True, False)
def changing_the_batch_size_raises(update_on_kvstore: bool) -> None:
    w = parameter()
    trainer = Trainer([w], "sgd", OPTIONS, store("dist_sync"), update_on_kvstore=update_on_kvstore)
    steps(trainer, w)
    assert_raises_kvstore_error(lambda: trainer.step(2), "follows step(1)")


@case()
def worker_updates_use_loaded_weights() -> None:
    w = parameter()
    trainer = Trainer(
        [w], "sgd", {"learning_rate": 1.0}, InProcess(1).store(), update_on_kvstore=False
    )
    steps(trainer, w)
    with torch.no_grad():
        w.fill_(10)
    steps(trainer, w)
    assert_equal(w.detach(), 9)


def invalid_calls() -> dict[str, tuple[Callable[[], object], str]]:
    """Return invalid calls of Trainer, each with a text that its error contains."""
    w = parameter()
    return {
        "no parameters": (lambda: Trainer([]), "no parameters to train"),
        "numbers": (lambda: Trainer([1.0]), "float"),
        "unknown optimizer": (lambda: Trainer([w], "sgdd"), "servers do not support the optimizer"),
        "unknown option": (lambda: Trainer([w], "sgd", {"rate": 1}), "'rate'"),
        "unknown store": (lambda: Trainer([w], kvstore="nothing"), 'unknown store "nothing"'),
    }


@case(*invalid_calls())
def invalid_trainer_arguments_raise(which: str) -> None:
    call, text = invalid_calls()[which]
    assert_raises_kvstore_error(call, text)


@case("shared", "frozen")
def shared_and_frozen_parameters_are_accepted(how: str) -> None:
    a, b = parameter(), parameter()
    if how == "frozen":
        b.requires_grad_(False)
    given: Any = [a, b, a] if how == "shared" else [a, b]
    trainer = Trainer(given, "sgd", {"learning_rate": 1.0}, store("dist_sync"))
    backward(*([a] if how == "frozen" else [a, b]))
    trainer.step(1)
    assert_equal(a.detach(), -1)
    assert_equal(b.detach(), 0 if how == "frozen" else -1)


@case()
def copied_model_trains_independently() -> None:
    net = torch.nn.Linear(2, 1)
    other = copy.deepcopy(net)
    for model in (net, other):
        trainer = Trainer(model.parameters(), "adam", kvstore=store("dist_sync"))
        model(torch.ones(1, 2)).sum().backward()
        trainer.step(1)
    for a, b in zip(net.parameters(), other.parameters(), strict=True):
        assert_equal(a.detach(), b.detach())
