"""Workers, servers and a scheduler as real processes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from multiprocessing.connection import wait

import pytest
import torch
from devices import on_devices
from kvstore_nodes import WAIT, Nodes, interrupt, start_nodes
from kvstore_nodes import fork_server as fork_server

from distkit import kvstore
from distkit.errors import KVStoreError
from distkit.events import Op, State
from distkit.kvstore import KVStore
from distkit.kvstore.protocol import placement


@pytest.fixture(scope="module")
def nodes(fork_server: None) -> Iterator[Nodes]:
    """Three workers and two servers, shared by several runs."""
    with start_nodes(3, 2) as nodes:
        yield nodes


@pytest.fixture
def pair(fork_server: None) -> Iterator[Nodes]:
    """Two workers and one server, which the test may interrupt."""
    with start_nodes(2, 1) as nodes:
        yield nodes


# -- devices ---------------------------------------------------------------------


def push_from_two_devices(kv: KVStore, *, device: str) -> list[object]:
    """Push gradients from two devices per worker for a small, a large and a bfloat16 key."""
    shapes = {"small": (3,), "big": (300, 100), "low_precision": (5,)}
    dtypes = {"low_precision": torch.bfloat16}
    tensors = {k: torch.zeros(shape, dtype=dtypes.get(k)) for k, shape in shapes.items()}
    kv.init([*shapes], [*tensors.values()])
    for n in range(3):
        both = [
            [torch.full_like(t.t(), value, device=device).t() for value in (n + kv.rank, 1)]
            for t in tensors.values()
        ]
        kv.push([*shapes], both)
        for pair in both:
            for t in pair:
                t.fill_(9)  # the pushes have been sent
    out = [torch.zeros(t.shape, dtype=t.dtype, device=device) for t in tensors.values()]
    kv.pull([*shapes], out)
    return [[t.unique().tolist() for t in out], str({t.device.type for t in out}), vars(kv.traffic)]


@on_devices
@pytest.mark.parametrize("mode", ["dist_sync", "dist_sync_device"])
def test_device_gradients_are_summed_before_the_push(nodes: Nodes, mode: str, device: str) -> None:
    for pulled, kind, traffic in nodes.run(mode, partial(push_from_two_devices, device=device)):
        assert pulled == [[12.0]] * 3  # in the last round: (2 + 0 + 1) + (2 + 1 + 1) + (2 + 2 + 1)
        assert kind == str({torch.device(device).type})
        per_worker = 3 * (3 * 4 + 30_000 * 4 + 5 * 2)
        on_device = mode.endswith("_device")
        assert traffic == {
            "gradients": 2 * per_worker,
            "to_host": per_worker if on_device else 2 * per_worker,
            "held": 120_000 if on_device else 0,
            "sent": per_worker,
        }


# -- values ----------------------------------------------------------------------


def adds_up(kv: KVStore) -> float:
    kv.set_optimizer(kvstore.SGD(learning_rate=-1))
    kv.init("w", torch.zeros(1))
    for n in range(200):
        kv.push("w", torch.full((1,), 2.0**kv.rank))
        if n % 7 == 0:
            kv.pull("w")
    kv.barrier()
    return kv.pull("w").item()


@pytest.mark.parametrize("mode", ["dist_sync", "dist_async"])
def test_every_push_counts_once(nodes: Nodes, mode: str) -> None:
    assert nodes.run(mode, adds_up) == [200 * (1 + 2 + 4)] * 3


def push_and_return(kv: KVStore) -> None:
    kv.set_optimizer(kvstore.SGD(learning_rate=-1))
    kv.init("w", torch.zeros(1_000_000))
    for _ in range(5):
        kv.push("w", torch.ones(1_000_000))


def test_pushes_in_flight_at_the_end_arrive(nodes: Nodes) -> None:
    _, trace = nodes.trace("dist_async", push_and_return)
    assert sum(s.op is Op.MARK for s in trace.spans) == 2 * 15  # two parts


# -- errors ----------------------------------------------------------------------


def other_shape(kv: KVStore) -> list[float]:
    shape = 3 if kv.rank == 1 else 2
    try:
        kv.init("w", torch.zeros(shape))
    except KVStoreError as e:
        return [str(e)]
    return kv.pull("w").tolist()


def test_only_the_worker_with_a_wrong_shape_gets_the_error(nodes: Nodes) -> None:
    first, second, third = nodes.run("dist_sync", other_shape)
    assert first == third == [0, 0]
    assert "init of 'w' got float32[3], but the key was initialized as float32[2]" in second[0]


def trivial(kv: KVStore) -> int:
    return kv.rank


def test_mixed_modes_raise(nodes: Nodes) -> None:
    nodes.begin("dist_sync", trivial, only=[0])
    nodes.begin("dist_async", trivial, only=[1], join=True)
    (ready,) = wait([nodes.connections[0], nodes.connections[1]], WAIT)
    failed = 0 if ready is nodes.connections[0] else 1
    assert f"worker {failed} requests" in nodes.result(failed)
    interrupt(nodes, 1 - failed)
    assert nodes.run("dist_sync", trivial) == [0, 1, 2]


# -- faults ----------------------------------------------------------------------


def alone_at_the_barrier(kv: KVStore) -> None:
    kv.barrier() if kv.rank == 0 else None


def test_barrier_can_be_interrupted(pair: Nodes) -> None:
    pair.begin("dist_sync", alone_at_the_barrier)
    pair.result(1)
    assert interrupt(pair, 0)[0] < 10
    assert pair.run("dist_sync", trivial) == [0, 1]


# -- the trace -------------------------------------------------------------------


def one_step(kv: KVStore) -> None:
    kv.set_optimizer(kvstore.SGD(learning_rate=1))
    kv.init("w", torch.zeros(4))
    kv.push("w", torch.ones(4))
    kv.pull("w")
    kv.barrier()


def test_every_request_takes_two_messages(nodes: Nodes) -> None:
    _, trace = nodes.trace("dist_sync", one_step)
    home = 3 + placement.server_of("w", 2)
    found = {(m.src, m.dst, m.op, m.label, m.nbytes) for m in trace.messages}
    for worker in range(3):
        assert {
            (worker, 5, Op.REGISTER, "dist_sync", 0),
            (5, worker, Op.REGISTER, "dist_sync", 0),
            (worker, home, Op.INIT, "w", 0 if worker else 16),
            (home, worker, Op.INIT, "w", 0),
            (worker, home, Op.PUSH, "w", 16),
            (home, worker, Op.PUSH, "w", 0),
            (worker, home, Op.PULL, "w", 0),
            (home, worker, Op.PULL, "w", 16),
        } <= found
    assert {(3, 5, Op.REGISTER, "", 0), (5, 4, Op.REGISTER, "", 0)} <= found
    assert len(trace.messages) == 2 * (5 + 3 * 2 + 3 * 3)  # registrations, optimizer, w
    for m in trace.messages:
        assert m.sent is not None
        assert m.received is not None
        assert m.sent <= m.received


def test_updates_and_values_are_in_the_trace(nodes: Nodes) -> None:
    _, trace = nodes.trace("dist_sync", one_step)
    (update,) = (s for s in trace.spans if s.op is Op.MARK)
    assert (update.label, update.attributes["stale_by"]) == ("update w → v1 ← 0, 1, 2", (0, 0, 0))
    assert (update.before.values, update.after.values) == ((0,) * 4, (-3,) * 4)
    pulls = [s for s in trace.spans if s.op is Op.PULL]
    assert [p.after.values for p in pulls] == [(-3,) * 4] * 3
    assert len({s.match for s in trace.spans if s.op is Op.BARRIER}) == 1
    assert {s.state for s in trace.spans} == {State.COMPLETED}
