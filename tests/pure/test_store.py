"""The rendezvous store, in a file or on a server: torch's interface and time limits."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from distkit.cluster.rank.process_group import PollingStore, open_store
from distkit_hosts.remote.store import StoreClient, StoreServer


@pytest.fixture
def server(tmp_path: Path) -> Iterator[StoreServer]:
    server = StoreServer(str(tmp_path))
    yield server
    server.close()


@pytest.fixture
def stores(server: StoreServer, tmp_path: Path) -> Iterator[list[PollingStore]]:
    """Two stores of one group, and a store of another."""
    clients = [StoreClient(str(tmp_path), group) for group in ("store-1-0", "store-1-0", "store-2")]
    yield [PollingStore(client.call) for client in clients]
    for client in clients:
        client.close()


@pytest.fixture(params=["file", "server"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> list[PollingStore]:
    """Two stores of one group."""
    if request.param == "server":
        return request.getfixturevalue("stores")[:2]
    return [open_store(str(tmp_path), "file", 2) for _ in range(2)]


def test_stores_of_a_group_share_values(pair: list[PollingStore]) -> None:
    one, same = pair
    one.set("k", "v")
    assert [one.add("n", 2), same.add("n", 3)] == [2, 5]
    assert [same.get("k"), same.check(["k", "n"]), same.check(["k", "m"])] == [b"v", True, False]
    assert [one.compare_set("k", "v", "w"), one.compare_set("k", "v", "x")] == [b"w", b"w"]
    before = same.num_keys()
    assert [one.delete_key("k"), same.check(["k"])] == [True, False]
    assert same.num_keys() == before - 1


def test_stores_of_two_groups_share_nothing(stores: list[PollingStore]) -> None:
    one, _, other = stores
    one.set("k", "v")
    assert [one.add("n", 2), other.add("n", 1), other.check(["k"])] == [2, 1, False]
    assert [one.num_keys(), other.num_keys()] == [2, 1]
    assert [one.delete_key("k"), one.delete_key("k")] == [True, False]


def test_store_works_behind_a_prefix_store(pair: list[PollingStore]) -> None:
    one, two = (dist.PrefixStore("p", store) for store in pair)
    one.set("a", "one")
    two.wait(["a"])
    assert two.get("a") == b"one"
    assert one.add("n", 1) == 1 and two.add("n", 1) == 2
    assert two.check(["a"]) and not pair[0].check(["a"])
    before = one.num_keys()
    assert one.delete_key("a") and not two.check(["a"])
    assert two.num_keys() == before - 1


def test_wait_times_out(pair: list[PollingStore]) -> None:
    store, _ = pair
    with pytest.raises(dist.DistStoreError, match="keys not set within"):
        store.wait(["never"], timedelta(seconds=0.01))
    store.set_timeout(timedelta(seconds=0.01))
    with pytest.raises(dist.DistStoreError, match=r"not set within .*: \['never'\]"):
        store.get("never")


def test_finished_run_leaves_no_values(server: StoreServer, stores: list[PollingStore]) -> None:
    finished, _, next_run = stores
    finished.set("k", "v")
    next_run.set("k", "v")
    server.forget("store-1")
    assert [finished.num_keys(), next_run.num_keys()] == [0, 1]
