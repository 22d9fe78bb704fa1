"""Optimizers on the servers: formulas and options."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from distkit import kvstore
from distkit.kvstore import KVStore
from tests.stress.kvstore.cases.catalog import (
    assert_close,
    assert_equal,
    assert_raises_kvstore_error,
    case,
    ones,
    store,
)
from tests.support.in_process import InProcess

LR, WD = 0.1, 0.02

#: Classes of torch.optim, with options.
TORCH: dict[str, dict[str, Any]] = {
    "SGD": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    "Adam": {"amsgrad": True},
    "AdamW": {},
    "Adagrad": {"lr_decay": 0.1},
    "RMSprop": {"centered": True, "momentum": 0.5},
    "Adadelta": {},
    "Adamax": {},
    "NAdam": {},
    "RAdam": {},
    "ASGD": {},
    "Rprop": {},
}


def gradients(steps: int, shape: tuple[int, ...]) -> list[torch.Tensor]:
    """Return random gradients, the same in every call."""
    values = np.random.default_rng(5).standard_normal((steps, *shape))
    return [torch.from_numpy(g) for g in values]


@case(*((momentum, scale) for momentum in (0.0, 0.9) for scale in (1.0, 0.5)))
def sgd_follows_mxnets_formula(momentum: float, scale: float) -> None:
    kv, w, m, lr = store("dist_sync", 2, 3), np.linspace(-1, 1, 12), 0.0, LR
    options = {"momentum": momentum, "wd": WD, "rescale_grad": scale}
    kv.set_optimizer("sgd", learning_rate=lr, **options)
    kv.init("w", torch.from_numpy(w.copy()))
    for n, g in enumerate(gradients(6, (12,))):
        if n == 3:  # unlike in torch, the momentum keeps the old rate
            lr = 3 * LR
            kv.set_optimizer("sgd", learning_rate=lr, replace=True, **options)
        m = momentum * m - lr * (scale * g.numpy() + WD * w)
        w = w + m
        kv.push("w", g)
    assert_close(kv.pull("w"), w)


@case(*TORCH)
def torch_optimizers_step_as_in_one_process(name: str) -> None:
    value = torch.linspace(-1, 1, 12, dtype=torch.float64).view(3, 4)
    weight = torch.nn.Parameter(value.clone())
    theirs = getattr(torch.optim, name)([weight], lr=LR, **TORCH[name])
    kv = store("dist_sync", 2, 3)
    kv.set_optimizer(getattr(torch.optim, name), lr=LR, **TORCH[name])
    kv.init("w", value)
    for g in gradients(5, (3, 4)):
        weight.grad = g
        theirs.step()
        kv.push("w", g)
    assert_close(kv.pull("w"), weight.detach())


@case("class", "instance", "name", "MXNet's name", "specification")
def optimizer_is_accepted_in_every_form(form: str) -> None:
    given: dict[str, tuple[Any, dict[str, Any]]] = {
        "class": (torch.optim.SGD, {"lr": 0.5}),
        "instance": (torch.optim.SGD([torch.ones(1)], lr=0.5), {}),
        "name": ("torch.optim.SGD", {"lr": 0.5}),
        "MXNet's name": ("SGD", {"learning_rate": 0.5}),
        "specification": (kvstore.SGD(learning_rate=0.5), {}),
    }
    kv = store("dist_sync")
    optimizer, options = given[form]
    kv.set_optimizer(optimizer, **options)
    kv.init("w", ones())
    kv.push("w", ones())
    assert_equal(kv.pull("w"), 0.5)


@case("sgd", "adam", "torch.optim.SGD")
def gradients_are_rescaled_before_the_update(name: str) -> None:
    found = []
    for scale in (1.0, 4.0):
        kv = store("dist_sync")
        kv.set_optimizer(name, rescale_grad=1 / scale)
        kv.init("w", ones())
        for g in (0.5, 3.0, -2.0):
            kv.push("w", ones(g * scale))
        found.append(kv.pull("w"))
    assert_equal(found[0], found[1])


@case("sgd", "torch.optim.SGD")
def keys_can_have_separate_optimizers(name: str) -> None:
    kv = store("dist_sync", 2)
    kv.set_optimizer(name, learning_rate=0.5, wd=0.5)
    kv.set_optimizer(name, learning_rate=1.0, wd=0.5, keys=["a"])
    kv.set_optimizer(name, learning_rate=0.5, keys=["b", 3])
    kv.init(["a", "b", 3, 4], [ones()] * 4)
    kv.push(["a", "b", 3, 4], [ones()] * 4)
    for found, expected in zip(
        kv.pull(["a", "b", 3, 4]) or (), (-0.5, 0.5, 0.5, 0.25), strict=True
    ):
        assert_close(found, expected * torch.ones(4, 4))


@case()
def optimizer_with_state_raises() -> None:
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.Adam([weight])
    weight.grad = torch.ones(1)
    optimizer.step()
    assert_raises_kvstore_error(lambda: store("dist_sync").set_optimizer(optimizer), "taken steps")


@case("sgd", "torch.optim.Adam")
def second_optimizer_raises_unless_replaced(name: str) -> None:
    kv = store("dist_sync")
    kv.set_optimizer(name)
    kv.set_optimizer(name)
    assert_raises_kvstore_error(lambda: kv.set_optimizer("adagrad"), "once per run")
    kv.set_optimizer("adagrad", replace=True)


@case(*((name, multi) for name in ("sgd", "adam", "torch.optim.SGD") for multi in (0, 1)))
def multi_precision_keeps_a_float32_copy(name: str, multi: int) -> None:
    kv = store("dist_sync", 2, 3)
    kv.set_optimizer(name, learning_rate=1e-4, multi_precision=bool(multi))
    kv.init("w", ones(dtype=torch.bfloat16))
    for _ in range(20):
        kv.push("w", ones(dtype=torch.bfloat16))
    found: Any = kv.pull("w")
    assert found.dtype is torch.bfloat16
    assert_equal(found, torch.tensor(1 - 20e-4).bfloat16().expand(4, 4) if multi else 1)


@case("sgd", "torch.optim.Adam")
def changing_the_learning_rate_keeps_the_state(name: str) -> None:
    """Setting the same optimizer with a new rate does not reset it."""
    weight = torch.nn.Parameter(torch.ones(4))
    theirs = torch.optim.Adam([weight], lr=LR)
    kv = store("dist_sync")
    kv.set_optimizer(torch.optim.Adam, lr=LR)
    kv.init("w", torch.ones(4))
    for rate in (LR, LR, 3 * LR, LR):
        theirs.param_groups[0]["lr"] = rate
        kv.set_optimizer(torch.optim.Adam, lr=rate, replace=True)
        weight.grad = torch.ones(4)
        theirs.step()
        kv.push("w", torch.ones(4))
        assert_close(kv.pull("w"), weight.detach())


@case("sgd", "adam")
def all_workers_can_set_the_same_optimizer(name: str) -> None:
    def work(kv: KVStore) -> Any:
        kv.set_optimizer(name, learning_rate=0.5, rescale_grad=1 / kv.num_workers)
        kv.init("w", ones())
        kv.push("w", ones())
        return kv.pull("w")

    for found in InProcess(3, 2, bound=5).run(work):
        assert_close(found, ones(0.5))
