"""The rendezvous store of ranks on several machines: torch's interface and time limits."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from distkit_hosts.remote.store import StoreServer
from distkit_hosts.remote.store_client import StoreClient


@pytest.fixture
def server(tmp_path: Path) -> Iterator[StoreServer]:
    server = StoreServer(str(tmp_path))
    yield server
    server.close()


@pytest.fixture
def clients(server: StoreServer, tmp_path: Path) -> Iterator[list[StoreClient]]:
    """Two clients of one group, and a client of another."""
    clients = [StoreClient(str(tmp_path), group) for group in ("store-1-0", "store-1-0", "store-2")]
    yield clients
    for client in clients:
        if client._channel is not None:
            client._channel.close()


def test_clients_of_a_group_share_values(clients: list[StoreClient]) -> None:
    one, same, other = clients
    one.set("k", "v")
    assert [one.add("n", 2), same.add("n", 3), other.add("n", 1)] == [2, 5, 1]
    assert [same.get("k"), same.check(["k", "n"]), other.check(["k"])] == [b"v", True, False]
    assert [one.compare_set("k", "v", "w"), one.compare_set("k", "v", "x")] == [b"w", b"w"]
    assert [one.num_keys(), one.delete_key("k"), one.delete_key("k"), other.num_keys()] == [
        2,
        True,
        False,
        1,
    ]


def test_torch_uses_it_through_a_prefix(clients: list[StoreClient]) -> None:
    one, two = (dist.PrefixStore("p", client) for client in clients[:2])
    one.set("a", "one")
    two.wait(["a"])
    assert two.get("a") == b"one"
    assert one.add("n", 1) == 1 and two.add("n", 1) == 2
    assert two.check(["a"]) and not clients[0].check(["a"])
    before = one.num_keys()
    assert one.delete_key("a") and not two.check(["a"])
    assert two.num_keys() == before - 1


def test_wait_times_out(clients: list[StoreClient]) -> None:
    store, *_ = clients
    with pytest.raises(dist.DistStoreError, match="were not set within"):
        store.wait(["never"], timedelta(seconds=0.01))
    store.set_timeout(timedelta(seconds=0.01))
    with pytest.raises(dist.DistStoreError, match=r"\['never'\] were not set"):
        store.get("never")


def test_finished_run_leaves_no_values(server: StoreServer, clients: list[StoreClient]) -> None:
    over, _, next_run = clients
    over.set("k", "v")
    next_run.set("k", "v")
    server.forget("store-1")
    assert [over.num_keys(), next_run.num_keys()] == [0, 1]
