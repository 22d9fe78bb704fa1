"""The rendezvous store: torch's interface and time limits."""

from __future__ import annotations

import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from distkit.cluster.rank.process_group import InterruptibleStore
from distkit_hosts.remote.store import StoreClient, StoreServer


@pytest.fixture
def file(tmp_path: Path) -> str:
    return str(tmp_path / "store")


@pytest.fixture
def store(file: str) -> InterruptibleStore:
    return InterruptibleStore(dist.FileStore(file, 2))


def test_store_keeps_values(store: InterruptibleStore) -> None:
    store.set("a", "one")
    assert store.get("a") == b"one"
    assert store.add("n", 2) == 2 and store.add("n", 3) == 5
    assert store.compare_set("a", "one", "two") == b"two"
    assert store.check(["a", "n"]) and not store.check(["a", "b"])
    store.set("b", "3")
    before = store.num_keys()
    assert store.delete_key("b") and not store.check(["b"])
    assert store.num_keys() == before - 1
    assert not store.has_extended_api()


def test_torch_uses_it_through_a_prefix(store: InterruptibleStore, file: str) -> None:
    other = InterruptibleStore(dist.FileStore(file, 2))  # C++ does not keep it alive
    one, two = dist.PrefixStore("p", store), dist.PrefixStore("p", other)
    one.set("a", "one")
    two.wait(["a"])
    assert two.get("a") == b"one"
    assert one.add("n", 1) == 1 and two.add("n", 1) == 2
    assert two.check(["a"]) and not store.check(["a"])
    before = one.num_keys()
    assert one.delete_key("a") and not two.check(["a"])
    assert two.num_keys() == before - 1


def test_wait_times_out(store: InterruptibleStore) -> None:
    with pytest.raises(dist.DistStoreError, match="were not set within"):
        store.wait(["never"], timedelta(seconds=0.01))
    store.set_timeout(timedelta(seconds=0.01))
    with pytest.raises(dist.DistStoreError, match=r"\['never'\] were not set"):
        store.get("never")


@pytest.mark.parametrize("through", ["itself", "a prefix"])
def test_signal_ends_a_wait(store: InterruptibleStore, through: str) -> None:
    used = store if through == "itself" else dist.PrefixStore("p", store)
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        threading.Timer(0.05, os.kill, [os.getpid(), signal.SIGINT]).start()
        used.get("never")
    assert time.monotonic() - start < 30


def test_ranks_of_several_machines_share_a_store(tmp_path: Path) -> None:
    server = StoreServer(str(tmp_path))
    one, same, other = (StoreClient(str(tmp_path), group) for group in "aab")
    one.set("k", b"v")
    assert [one.add("n", 2), same.add("n", 3), other.add("n", 1)] == [2, 5, 1]
    assert [same.get("k"), same.check(["k", "n"]), other.check(["k"])] == [b"v", True, False]
    assert [one.compare_set("k", "v", "w"), one.compare_set("k", "v", "x")] == [b"w", b"w"]
    assert [one.num_keys(), one.delete_key("k"), one.delete_key("k"), other.num_keys()] == [
        2,
        True,
        False,
        1,
    ]
    for client in (one, same, other):
        assert client._channel is not None
        client._channel.close()
    server.close()


def test_finished_run_leaves_no_values(tmp_path: Path) -> None:
    server = StoreServer(str(tmp_path))
    over, next_run = (StoreClient(str(tmp_path), f"store-{run}-0") for run in (1, 11))
    over.set("k", b"v")
    next_run.set("k", b"v")
    server.forget("store-1")
    assert [over.num_keys(), next_run.num_keys()] == [0, 1]
    for client in (over, next_run):
        assert client._channel is not None
        client._channel.close()
    server.close()
