"""Several devices per worker: sums, and batches split across the devices."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from distkit.kvstore import KVStore, split_and_load
from tests.stress.kvstore.cases.catalog import (
    adding,
    assert_equal,
    assert_raises_kvstore_error,
    case,
    ones,
    store,
)
from tests.support.in_process import InProcess

STORES = "dist_sync", "dist_sync_device", "dist_async", "dist_async_device"


@case(*((kind, devices) for kind in STORES for devices in (1, 4)))
def device_values_are_summed_and_written_to_all_devices(kind: str, devices: int) -> None:
    kv = adding(store(kind))
    kv.init("w", ones(0))
    outs = [torch.zeros(4, 4) for _ in range(devices)]
    for n in (1, 2):
        kv.push("w", [ones(i + 1) for i in range(devices)])
        kv.pull("w", out=outs)
        for out in outs:
            assert_equal(out, n * devices * (devices + 1) / 2)


@case(*STORES)
def push_does_not_change_device_gradients(kind: str) -> None:
    kv, gradients = adding(store(kind)), [ones(1), ones(2), ones(3)]
    kv.init("w", ones(0))
    kv.push("w", gradients)
    kv.pull("w")
    for i, g in enumerate(gradients):
        assert_equal(g, i + 1)


@case("dist_sync", "dist_sync_device")
def values_of_all_devices_and_workers_are_summed(kind: str) -> None:
    def work(kv: KVStore) -> Any:
        kv.init("w", ones(0))
        kv.push("w", [ones(kv.rank + 1), ones(10)])
        return kv.pull("w")

    for found in InProcess(3, mode=kind).run(work):
        assert_equal(found, 36)


@case("dist_sync", "dist_sync_device")
def traffic_counts_devices_once(kind: str) -> None:
    kv = store(kind)
    kv.init("w", torch.zeros(2))
    kv.push("w", [torch.ones(2)] * 3)
    assert (kv.traffic.gradients, kv.traffic.sent) == (24, 8)


@case(2, 3, 4)
def batches_are_split_evenly(devices: int) -> None:
    batch = torch.arange(24).view(12, 2)
    parts = split_and_load(batch, ["cpu"] * devices)
    assert [len(p) for p in parts] == [12 // devices] * devices
    assert_equal(torch.cat(parts), batch)


@case((7, 2), (7, 3), (5, 4))
def uneven_batches_raise_unless_allowed(size: int, devices: int) -> None:
    batch = torch.arange(size)
    assert_raises_kvstore_error(
        lambda: split_and_load(batch, ["cpu"] * devices), "even_split=False"
    )
    parts = split_and_load(batch, ["cpu"] * devices, even_split=False)
    more, extra = divmod(size, devices)
    assert [len(p) for p in parts] == [more + (i < extra) for i in range(devices)]


@case(0, 1)
def batches_are_split_along_an_axis(axis: int) -> None:
    parts = split_and_load(torch.ones(4, 6), ["cpu", "cpu"], batch_axis=axis)
    assert [p.shape[axis] for p in parts] == [(4, 6)[axis] // 2] * 2


@case("list", "array")
def lists_and_arrays_become_tensors(what: str) -> None:
    data: Any = [[1.0], [2.0]] if what == "list" else np.ones((2, 1), np.float32)
    assert [tuple(p.shape) for p in split_and_load(data, ["cpu", "cpu"])] == [(1, 1)] * 2


@case()
def single_device_gets_the_whole_batch() -> None:
    (whole,) = split_and_load(torch.ones(3), [torch.device("cpu")])
    assert_equal(whole, 1)
