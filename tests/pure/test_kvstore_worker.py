"""The KVStore as training code uses it, with servers in this process."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distkit.consistency import Asynchronous, Synchronous
from distkit.errors import KVStoreError
from distkit.events import Op, State
from distkit.kvstore.client.requests import MAX_QUEUED, Requests
from distkit.kvstore.client.worker import KVStore
from distkit.kvstore.protocol.messages import Message, Request
from distkit.kvstore.protocol.options import StoreOptions
from distkit.kvstore.protocol.placement import parts_of
from distkit.kvstore.protocol.server import KVServer
from distkit.kvstore.protocol.wire import decode, encode
from distkit.recording import recorder
from distkit.trace.trace import Trace


def _round_trip(messages: Sequence[Message]) -> list[Any]:
    header, body = encode(*messages)
    return decode(header, b"".join(body)).messages


class Servers:
    """Servers 1, 2, … of one worker; messages are encoded as on the wire."""

    def __init__(
        self, count: int, *, model: Any = Asynchronous, require_optimizer: bool = False
    ) -> None:
        self.nodes = {
            i + 1: KVServer(model(), [0], require_optimizer=require_optimizer) for i in range(count)
        }
        self.requests: list[tuple[int, str]] = []
        self.batches = 0
        self._responses: deque[Message] = deque()

    def send(self, node: int, requests: Sequence[Request], to: int) -> None:
        self.requests += [(to, type(request).__name__) for request in requests]
        self.batches += 1
        for sent in _round_trip(requests):
            assert isinstance(sent, Request)
            responses = self.nodes[to].handle(sent)
            self._responses += _round_trip(responses)

    def receive(self, *, wait: bool) -> list[Message]:
        assert self._responses or not wait, "receive would wait forever"
        return [self._responses.popleft()] if self._responses else []

    def close(self) -> None:
        """Do nothing; there are no connections."""


def store(servers: Servers, *, bound: int = 10, node: int = 0) -> KVStore:
    return KVStore(
        Requests(servers, node),
        StoreOptions("dist_sync", bound),
        num_workers=1,
        servers=sorted(servers.nodes),
        scheduler=None,
    )


@pytest.fixture
def kv() -> KVStore:
    return store(Servers(1))


# -- keys and tensors -----------------------------------------------------------


def test_small_tensors_share_one_message() -> None:
    servers = Servers(1)
    kv = store(servers, bound=1 << 30)
    for size, batches in ((3, 1), (MAX_QUEUED // 4 + 1, 2)):
        kv.init(size, torch.zeros(size))
        servers.requests.clear()
        servers.batches, out = 0, torch.zeros(size)
        kv.pushpull(size, torch.full((size,), 2.0), out=out)
        assert [kind for _, kind in servers.requests] == ["Push", "Pull"]
        assert servers.batches == batches
        assert bool((out == 2).all())


def test_parameters_and_slices_are_written_in_place(kv: KVStore) -> None:
    weight, grid = torch.nn.Parameter(torch.zeros(2)), torch.zeros(2, 3)
    kv.init("w", weight)
    kv.push("w", torch.tensor([1.0, 2.0]))
    kv.pull("w", out=weight)
    kv.pull("w", out=grid[:, 1])
    assert weight.tolist() == [1, 2]
    assert grid.tolist() == [[0, 1, 0], [0, 2, 0]]


def test_any_shape_is_stored_under_a_number_or_a_name(kv: KVStore) -> None:
    transposed = torch.arange(6.0).view(2, 3).T
    kv.init([3, "3", "w"], [torch.tensor(2.5), torch.zeros(0, 3), torch.zeros(3, 2)])
    kv.push("w", transposed)
    number, empty, weight = kv.pull([3, "3", "w"])
    assert (number.item(), empty.shape) == (2.5, (0, 3))
    assert torch.equal(weight, transposed)


# -- keys on servers ------------------------------------------------------------


@given(st.integers() | st.text(), st.integers(0, 1000), st.integers(1, 7), st.integers(0, 1000))
def test_parts_partition_the_array(key, size: int, servers: int, bound: int) -> None:
    parts = parts_of(key, size, servers, bound)
    assert [p.start for p in parts] == [0, *(p.stop for p in parts[:-1])]
    assert parts[-1].stop == size
    assert len(parts) == (servers if servers > 1 and size >= bound else 1)
    assert len({p.server for p in parts}) == len(parts)
    assert max(p.stop - p.start for p in parts) - min(p.stop - p.start for p in parts) <= 1


# -- errors ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda kv: kv.pull("v"), "pull of 'v' failed: this worker has not initialized the key"),
        (lambda kv: kv.push("v", torch.ones(2)), "this worker has not initialized the key"),
        (lambda kv: kv.pushpull(999, torch.ones(2)), "Call kv.init(999, value) on every worker"),
        (lambda kv: kv.init("w", torch.ones(2)), "init of 'w' failed: this run has already"),
        (lambda kv: kv.init("w", torch.ones(3)), "init of 'w' got float32[3]"),
        (lambda kv: kv.init("v", [torch.ones(2)] * 2), "init of 'v' got 2 tensors"),
        (lambda kv: kv.init(["v", "v"], [torch.ones(2)] * 2), "init of 'v' got 2 tensors"),
        (
            lambda kv: kv.init([1, 2], [torch.ones(2)]),
            "init: the numbers of keys (2) and values (1) differ",
        ),
        (lambda kv: kv.push("w", torch.ones(3)), "push of 'w' got float32[3]"),
        (lambda kv: kv.push("w", torch.ones(2).half()), "push of 'w' got float16[2]"),
        (lambda kv: kv.push("w", [torch.ones(2), torch.ones(1)]), "push of 'w' got float32[1]"),
        (lambda kv: kv.pull("w", out=torch.ones(2, 1)), "pull of 'w' got float32[2, 1]"),
        (lambda kv: kv.push("w", [1.0, 2.0]), "push of 'w' got float. Pass a tensor"),
        (lambda kv: kv.push("w", (1, 2.0)), "push of 'w' got int. Pass a tensor"),
        (lambda kv: kv.push("w", None), "got NoneType. Pass a tensor"),
        (lambda kv: kv.push("w", [torch.ones(2), None]), "a gradient is None before backward"),
        (lambda kv: kv.init("v", None), "init of 'v' got NoneType. Pass a tensor"),
        (lambda kv: kv.push("w", []), "push of 'w' got no tensor. Pass a tensor"),
        (lambda kv: kv.init("v", 1.0), "init of 'v' got float. Pass a tensor"),
        (lambda kv: kv.push("w", np.ones(2)), "push of 'w' got ndarray. Pass a tensor"),
        (
            lambda kv: kv.push(["w"], torch.ones(2)),
            "keys (1) and values (2) differ",
        ),
        (lambda kv: kv.push(1.5, torch.ones(2)), "1.5 is not a key"),
        (lambda kv: kv.init(1.5, torch.ones(2)), "1.5 is not a key"),
        (lambda kv: kv.pull(1.5), "1.5 is not a key"),
        (lambda kv: kv.pull(True), "True is not a key"),
        (lambda kv: kv.init("u", torch.ones(2, dtype=torch.uint16)), "cannot be summed"),
        (
            lambda kv: kv.set_optimizer(torch.optim.LBFGS),
            "do not support the optimizer <class 'torch.optim",
        ),
        (
            lambda kv: kv.set_optimizer(torch.optim.LBFGS([torch.ones(1)])),
            "do not support the optimizer <class 'torch.optim",
        ),
        (lambda kv: kv.set_optimizer(0.1), "not support the optimizer 0.1. Use kvstore.SGD"),
        (lambda kv: kv.set_optimizer("sgdd"), "the optimizer 'sgdd'. Use kvstore.SGD"),
        (lambda kv: kv.set_optimizer("lbsgd"), "such as (torch.optim.Adam, lr=0.001)"),
        (lambda kv: kv.set_optimizer("nag"), "do not support the optimizer 'nag'"),
        (lambda kv: kv.set_optimizer("torch.optim.LBFGS"), "the optimizer 'torch.optim.LBFGS'"),
        (lambda kv: kv.set_optimizer("torch.optim.Nothing"), "optimizer 'torch.optim.Nothing'"),
        (lambda kv: kv.set_optimizer("os.system"), "the optimizer 'os.system'. Use kvstore.SGD"),
        (lambda kv: kv.set_optimizer(print), "servers do not support the optimizer <built-in"),
        (lambda kv: kv.set_optimizer(torch.optim.Adafactor), "do not support the optimizer"),
        (lambda kv: kv.set_optimizer(torch.optim.Muon), "do not support the optimizer"),
        (lambda kv: kv.set_optimizer(torch.optim.SparseAdam), "do not support the optimizer"),
        (lambda kv: kv.set_optimizer("sgd", rate=1), "'rate'. Its options are lr, momentum"),
        (lambda kv: kv.set_optimizer("adam", momentum=1.0), "'momentum'. Its options are lr"),
        (
            lambda kv: kv.set_optimizer("torch.optim.Adam", beta1=1.0),
            "'beta1'. Its options are lr",
        ),
        (lambda kv: kv.set_optimizer(torch.optim.Adam, lr=-1.0), "Invalid learning rate"),
        (lambda kv: kv.set_optimizer("sgd", learning_rate="much"), "sgd(lr='much')"),
    ],
)
@pytest.mark.parametrize("model", [Synchronous, Asynchronous])
@pytest.mark.parametrize("servers", [1, 3])
def test_invalid_calls_raise_and_the_store_continues(call, message: str, servers, model) -> None:
    kv = store(Servers(servers, model=model), bound=2)
    kv.init("w", torch.zeros(2))
    with pytest.raises(KVStoreError) as error:
        call(kv)
    assert message in str(error.value)
    assert kv.pushpull("w", torch.ones(2)).tolist() == [1, 1]


@pytest.mark.parametrize("call", ["push", "pull", "barrier", "close"])
def test_error_of_a_push_is_raised_by_the_next_call(call: str) -> None:
    kv = store(Servers(2, require_optimizer=True))
    kv.init(["w", "v"], [torch.zeros(2), torch.zeros(2)])
    kv.push("w", torch.ones(2))
    assert kv.pull("v").tolist() == [0, 0]
    fields = {"push": ("w", torch.ones(2)), "pull": ("w",)}.get(call, ())
    with pytest.raises(KVStoreError, match="push of 'w' needs an optimizer"):
        getattr(kv, call)(*fields)
    if call != "close":
        assert kv.pull("w").tolist() == [0, 0]


# -- the trace ------------------------------------------------------------------


def test_requests_are_recorded(kv: KVStore) -> None:
    rank_recorder = recorder.Recorder(0)
    recorder.set_current(rank_recorder)
    try:
        kv.init("w", torch.zeros(2))
        kv.push("w", torch.ones(2))
        kv.pull("w")
    finally:
        recorder.set_current(None)
    trace = Trace(recorder.to_table(0, rank_recorder.drain()))
    init, push, pull = trace.spans
    assert [s.op for s in (init, push, pull)] == [Op.INIT, Op.PUSH, Op.PULL]
    assert {s.state for s in trace.spans} == {State.COMPLETED}
    assert (push.label, push.nbytes, push.shape, push.dtype) == ("w", 8, (2,), "float32")
    assert pull.after.values == (1, 1)
    assert "test_kvstore_worker.py" in push.where
