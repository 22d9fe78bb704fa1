"""What training code uses beside init, push and pull: compression, rows, states, the Trainer."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from devices import on_devices
from hypothesis import given
from hypothesis import strategies as st

from distkit import kvstore
from distkit.errors import KVStoreError
from distkit.kvstore import SGD, Trainer
from distkit.kvstore.protocol.compression import Compression, unpack
from tests.support.in_process import InProcess

SIZES = st.integers(1, 70)


def noise(size: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(size, dtype=np.float32))


# -- compression ----------------------------------------------------------------


def two_bits(threshold: float = 0.5) -> Compression:
    return Compression({"type": "2bit", "threshold": threshold})


@given(SIZES, st.floats(0.1, 2))
def test_2bit_is_mxnets(size: int, threshold: float) -> None:
    """The rule of MXNet's gradient_compression.cc, element by element."""
    compression, lost = two_bits(threshold), [0.0] * size
    limit = float(np.float32(threshold))
    for seed in range(4):
        x = noise(size, seed)
        packed = compression.pack("w", 0, x)
        sent = unpack(packed, threshold, size)
        assert packed.nbytes == math.ceil(size / 4)
        for i in range(size):
            total = float(np.float32(lost[i]) + np.float32(x[i].item()))
            one = limit if total >= limit else -limit if total <= -limit else 0.0
            lost[i] = float(np.float32(total) - np.float32(one))
            assert sent[i].item() == one


@given(size=SIZES, steps=st.integers(1, 8))
def test_what_is_lost_in_one_push_comes_with_the_next(size: int, steps: int) -> None:
    compression, pushed, received = two_bits(), torch.zeros(size), torch.zeros(size)
    for seed in range(steps):
        x = noise(size, seed)
        pushed += x
        received += unpack(compression.pack("w", 0, x), 0.5, size)
    torch.testing.assert_close(received + compression._lost["w", 0], pushed, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "params",
    [
        {"type": "1bit"},
        {"type": "topk", "ratio": 0.1},
        {},
        {"type": "2bit", "threshold": 0},
        {"type": "2bit", "threshold": math.inf},
        {"type": "2bit", "ratio": 1},
        {"type": "2bit", "ratio": 1, 2: 3},
        {"type": "2bit", "threshold": None},
        "2bit",
        None,
    ],
)
def test_other_compressions_are_refused_with_the_one_there_is(params) -> None:
    with pytest.raises(KVStoreError, match=r'takes \{"type": "2bit", "threshold": 0.5\}'):
        InProcess(1).store().set_gradient_compression(params)


@pytest.mark.parametrize("name", ["local", "device"])
def test_a_local_store_sends_nothing_to_compress(name: str) -> None:
    with pytest.raises(KVStoreError, match='Use a "dist_…" store'):
        kvstore.create(name).set_gradient_compression({"type": "2bit"})


def test_compressed_pushes_add_up_and_are_counted() -> None:
    kv = InProcess(1).store()
    kv.set_gradient_compression({"type": "2bit", "threshold": 0.5})
    kv.set_optimizer(SGD(learning_rate=-1))
    kv.init("w", torch.zeros(100))
    for _ in range(8):
        kv.push("w", torch.full((100,), 0.25))
    assert kv.pull("w").tolist() == [2.0] * 100
    assert (kv.traffic.gradients, kv.traffic.sent) == (8 * 400, 8 * 25)


def test_whole_numbers_are_sent_as_they_are() -> None:
    kv = InProcess(1).store()
    kv.set_gradient_compression({"type": "2bit", "threshold": 0.5})
    kv.init("n", torch.ones(2, dtype=torch.int64))
    assert kv.pushpull("n", torch.tensor([3, -7])).tolist() == [3, -7]


# -- devices ----------------------------------------------------------------------


@on_devices
@pytest.mark.parametrize(("name", "copied"), [("local", 3 * 8), ("device", 0)])
def test_devices_are_added_before_one_push(name: str, copied: int, device: str) -> None:
    kv = kvstore.create(name)
    kv.init("w", torch.zeros(2))
    gradients = [torch.full((2,), n, device=device) for n in (1.0, 2.0, 3.0)]
    kv.push("w", gradients)
    assert kv.pull("w").tolist() == [6, 6]
    assert [g.tolist() for g in gradients] == [[1, 1], [2, 2], [3, 3]]
    traffic = kv.traffic
    assert (traffic.gradients, traffic.to_host, traffic.sent) == (24, copied, 8)
    assert f"{copied} to the host ({24 - copied} saved)" in str(traffic)


# -- priorities, guards -------------------------------------------


@pytest.mark.parametrize("call", ["init", "push", "pushpull"])
def test_sparse_tensors_are_refused_with_a_remedy(call: str) -> None:
    kv, sparse = kvstore.create("local"), torch.eye(3).to_sparse()
    if call != "init":
        kv.init("e", torch.zeros(3, 3))
    with pytest.raises(KVStoreError, match=r"to_dense\(\), or .* sparse=False"):
        getattr(kv, call)("e", sparse)


def test_a_method_that_was_removed_says_what_to_do() -> None:
    with pytest.raises(AttributeError, match=r"row_sparse_pull was removed: .*kv.pull"):
        kvstore.create("local").row_sparse_pull  # noqa: B018


def test_broadcast_is_an_init_and_a_pull() -> None:
    kv, out = kvstore.create("local"), torch.zeros(2)
    kv.broadcast("w", torch.ones(2), out)
    assert out.tolist() == [1, 1]


def test_as_many_priorities_as_keys() -> None:
    kv = kvstore.create("local")
    kv.init([0, 1], [torch.zeros(1), torch.zeros(1)])
    kv.push([0, 1], [torch.ones(1), torch.full((1,), 2.0)], priority=[0, 1])
    assert [t.item() for t in kv.pull([0, 1], priority=[-1, 5])] == [1, 2]
    with pytest.raises(KVStoreError, match="2 keys with 1 priorities"):
        kv.push([0, 1], [torch.ones(1), torch.ones(1)], priority=[0])


# -- precision -----------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_multi_precision_keeps_what_16_bits_would_lose(dtype: torch.dtype) -> None:
    found = {}
    for multi in (False, True):
        kv = kvstore.create("local")
        kv.set_optimizer(SGD(learning_rate=1e-4, multi_precision=multi))
        kv.init("w", torch.ones(1, dtype=dtype))
        for _ in range(1000):
            kv.push("w", torch.ones(1, dtype=dtype))
        found[multi] = kv.pull("w")
        assert found[multi].dtype == dtype
    assert found[False].item() == 1
    assert found[True].item() == pytest.approx(0.9, rel=0.01)


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
@pytest.mark.parametrize("name", ["local", "device", None])
def test_the_trainer_does_what_torchs_sgd_does(on_store: bool, name: str | None) -> None:
    theirs, ours = network(), network()
    optimizer = torch.optim.SGD(theirs.parameters(), 0.02, 0.9, weight_decay=0.01)

    def step() -> None:
        for w in theirs.parameters():
            w.grad /= 8
        optimizer.step()

    expected = train(theirs, step)
    trainer = Trainer(ours.parameters(), "sgd", OPTIONS, name, update_on_kvstore=on_store)
    torch.testing.assert_close(train(ours, lambda: trainer.step(8)), expected)


@pytest.mark.parametrize("on_store", [True, False])
def test_replicas_on_several_devices_stay_equal(on_store: bool) -> None:
    one, two, whole = network(), network(), network()
    params = [list(pair) for pair in zip(one.parameters(), two.parameters(), strict=True)]
    trainer = Trainer(params, "sgd", OPTIONS, "device", update_on_kvstore=on_store)
    alone = Trainer(whole.parameters(), "sgd", OPTIONS, None)
    for batch in noise(5 * 8 * 5).view(5, 8, 5):
        for net, part in ((one, batch[:4]), (two, batch[4:]), (whole, batch)):
            net.zero_grad()
            net(part).square().sum().backward()
        trainer.step(8)
        alone.step(8)
    for a, b, c in zip(one.parameters(), two.parameters(), whole.parameters(), strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(a, c)


def test_gradients_can_be_clipped_between_sum_and_update() -> None:
    net = network()
    trainer = Trainer(net.parameters(), SGD(1.0), kvstore="local")
    net(torch.ones(8, 5)).sum().backward()
    before = copy.deepcopy(net.state_dict())
    trainer.allreduce_grads()
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1e-3)
    trainer.update(1)
    moved = torch.cat([(net.state_dict()[k] - before[k]).flatten() for k in before])
    assert moved.norm().item() == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize("on_store", [True, False])
def test_a_changed_step_size_keeps_the_momentum(on_store: bool) -> None:
    theirs, ours = network(), network()
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.02, momentum=0.9)
    mine = torch.optim.SGD(ours.parameters(), lr=0.02, momentum=0.9)
    trainer = Trainer(ours.parameters(), mine, kvstore="local", update_on_kvstore=on_store)
    for rate in (0.02, 0.01):
        optimizer.param_groups[0]["lr"] = rate
        trainer.set_learning_rate(rate)
        assert trainer.learning_rate == rate
        expected = train(theirs, optimizer.step)
        torch.testing.assert_close(train(ours, lambda: trainer.step(1)), expected)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Trainer([], "sgd"), "no parameters to train"),
        (lambda: Trainer([1.0], "sgd"), "got a float"),
        (lambda: Trainer(network().parameters(), "adamm", {"wd": 1}), "'adamm'. Give kvstore.SGD"),
        (lambda: Trainer(network().parameters(), "sgd", {"rate": 1}), "'rate'"),
        (lambda: Trainer(network().parameters(), SGD(), {"wd": 1}), "Give one"),
        (lambda: Trainer(network().parameters(), torch.nn.Linear), "know no optimizer"),
        (lambda: Trainer(network().parameters(), kvstore="dits"), 'no "dits" store'),
        (
            lambda: Trainer(network().parameters(), SGD(), kvstore=None).step(1),
            "before each step",
        ),
    ],
)
def test_what_cannot_be_trained(make, says: str) -> None:
    with pytest.raises(KVStoreError, match=says):
        make()


def test_what_the_servers_do_cannot_be_done_here() -> None:
    net = network()
    kv = InProcess().store()
    trainer = Trainer(net.parameters(), SGD(), kvstore=kv, update_on_kvstore=True)
    net(torch.ones(8, 5)).sum().backward()
    trainer.step(8)
    net(torch.ones(8, 5)).sum().backward()
    with pytest.raises(KVStoreError, match="servers divide by 8 since the first step"):
        trainer.step(4)
    for call in (trainer.allreduce_grads, lambda: trainer.update(8)):
        with pytest.raises(KVStoreError, match="update_on_kvstore=True: the servers update"):
            call()


def test_frozen_and_shared_parameters_are_trained_as_they_should() -> None:
    net = network()
    net[0].weight.requires_grad_(False)
    params = [*net.parameters(), net[2].weight]
    trainer = Trainer(params, SGD(0.1), kvstore="local")
    assert len(trainer._params) == 3
    named = Trainer(dict(net.named_parameters()), SGD(0.1), kvstore="local")
    assert named._params[0][0] is net[0].bias
