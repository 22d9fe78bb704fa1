"""Sparse tensors, and the Trainer compared with torch's optimizers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from distkit.errors import KVStoreError
from distkit.kvstore import Trainer
from tests.support.in_process import InProcess


def noise(size: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(size, dtype=np.float32))


# -- sparse tensors ----------------------------------------------------------------


@pytest.mark.parametrize("call", ["init", "push", "pushpull"])
def test_sparse_tensors_raise_with_a_remedy(call: str) -> None:
    kv, sparse = InProcess().store(), torch.eye(3).to_sparse()
    if call != "init":
        kv.init("e", torch.zeros(3, 3))
    with pytest.raises(KVStoreError, match=r"to_dense\(\), or .* sparse=False"):
        getattr(kv, call)("e", sparse)


# -- the Trainer --------------------------------------------------------------------


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))


def train(net: torch.nn.Module, step, batches: int = 5) -> list[torch.Tensor]:
    x = noise(batches * 8 * 5).view(batches, 8, 5)
    for batch in x:
        net.zero_grad()
        net(batch).square().sum().backward()
        step()
    return [w.detach() for w in net.parameters()]


OPTIONS = {"learning_rate": 0.02, "momentum": 0.9, "wd": 0.01}


@pytest.mark.parametrize("on_store", [True, False])
@pytest.mark.parametrize("name", ["dist_sync", "dist_sync_device"])
def test_trainer_equals_torch_sgd(on_store: bool, name: str) -> None:
    reference, model = network(), network()
    optimizer = torch.optim.SGD(reference.parameters(), 0.02, 0.9, weight_decay=0.01)

    def step() -> None:
        for w in reference.parameters():
            w.grad /= 8
        optimizer.step()

    expected = train(reference, step)
    kv = InProcess(mode=name).store()
    trainer = Trainer(model.parameters(), "sgd", OPTIONS, kv, update_on_kvstore=on_store)
    torch.testing.assert_close(train(model, lambda: trainer.step(8)), expected)


# -- optimizer state ----------------------------------------------------------------------------


def test_new_adagrad_is_accepted() -> None:
    w = torch.ones(1, requires_grad=True)
    kv = InProcess().store()
    trainer = Trainer([w], torch.optim.Adagrad([w], lr=0.5), kvstore=kv)
    w.grad = torch.ones(1)
    trainer.step(1)
    assert w.item() == pytest.approx(0.5)
    used_optimizer = torch.optim.Adagrad([w], lr=0.5)
    used_optimizer.step()
    with pytest.raises(KVStoreError, match="has already taken steps"):
        Trainer([w], used_optimizer, kvstore=kv)
