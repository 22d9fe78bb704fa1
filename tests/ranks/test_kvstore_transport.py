"""Transport of the parameter server's tensors and messages, and its access control."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from kvstore_nodes import Nodes, send_random_bytes, start_nodes, wait_until
from kvstore_nodes import fork_server as fork_server

from distkit import kvstore
from distkit.kvstore import KVStore
from distkit.kvstore.protocol.wire import LARGE
from distkit.kvstore.transport.node import new_keys


@pytest.fixture
def pair(fork_server: None) -> Iterator[Nodes]:
    """Two workers and one server."""
    with start_nodes(2, 1) as nodes:
        yield nodes


# -- large tensors ------------------------------------------------------------------


def large(kv: KVStore) -> list[bool]:
    """Return whether all pulled tensors are bitwise correct, for each of five rounds."""
    names = ["float16", "float32", "float64", "int64", "complex64", "uint8"]
    n = LARGE
    zeros = [torch.zeros(n, dtype=getattr(torch, name)) for name in names]
    kv.init(names, zeros)
    correct = []
    for round_ in range(1, 6):
        gradients = [(torch.arange(n) % 7 + kv.rank + round_).to(z.dtype) for z in zeros]
        kv.push(names, gradients)
        for tensor in gradients:
            tensor.zero_()  # the push has copied the values, so this has no effect
        found = kv.pull(names)
        out = torch.empty(n, dtype=torch.float32)
        kv.pull("float32", out=out)
        total = 2 * (torch.arange(n) % 7) + 1 + 2 * round_
        correct.append(all(torch.equal(f, total.to(f.dtype)) for f in [*found, out]))
        found[0].zero_()  # a pulled tensor belongs to the worker
    return correct


def test_large_tensors_arrive_unchanged(pair: Nodes) -> None:
    assert pair.run("dist_sync", large) == [[True] * 5] * 2


# -- access control ------------------------------------------------------------------


def adds_up(kv: KVStore) -> float:
    kv.set_optimizer(kvstore.SGD(learning_rate=-1))
    kv.init("w", torch.zeros(1))
    for _ in range(100):
        kv.push("w", torch.ones(1))
        kv.pull("w")
    kv.barrier()
    return kv.pull("w").item()


def test_random_bytes_have_no_effect(pair: Nodes) -> None:
    pair.begin("dist_async", adds_up)
    for node in (2, 3):
        send_random_bytes(Path(pair.folder, f"run-kv{node}"), 300)
    assert [pair.result(0), pair.result(1)] == [200, 200]


@pytest.mark.parametrize("keys", [None, new_keys()], ids=["no keys", "other keys"])
def test_worker_on_another_host_gets_no_reply_without_the_keys(
    keys: tuple[str, str] | None, tmp_path: Path
) -> None:
    with start_nodes(2, 1, keys=new_keys(), address="127.0.0.1") as nodes:
        nodes.begin("dist_async", adds_up, only=[1])
        listening = Path(nodes.folder, "listening")
        wait_until(listening.exists)
        other_host = {"folder": str(tmp_path), "scheduler_endpoint": listening.read_text()}
        nodes.processes.pop(0).kill()
        nodes.start("worker", 0, **{"keys": keys, **other_host})
        nodes.begin("dist_async", adds_up, only=[0], join=True)
        assert not nodes.connections[0].poll(0.5)
        nodes.processes.pop(0).kill()
        nodes.start("worker", 0, **other_host)
        nodes.begin("dist_async", adds_up, only=[0], join=True)
        assert [nodes.result(0), nodes.result(1)] == [200, 200]
