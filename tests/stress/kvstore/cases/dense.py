"""``init``, ``push``, ``pull`` and ``pushpull`` of dense tensors."""

from __future__ import annotations

from typing import Any

import torch

from distkit import kvstore
from distkit.kvstore import KVStore
from tests.stress.kvstore.cases.catalog import (
    SHAPE,
    SINGLE_WORKER,
    adding,
    assert_equal,
    assert_raises_kvstore_error,
    case,
    ones,
    store,
)
from tests.support.in_process import InProcess

#: Stores that sum without an optimizer.
SUMS = "dist_sync", "dist_sync_device"
KEYS = (3, "a")
LISTS = ([5, 7, 11], ["b", "c", "d"])


@case(*((kind, key) for kind in SINGLE_WORKER for key in KEYS))
def pull_returns_the_initial_value(kind: str, key: Any) -> None:
    kv, out = store(kind), torch.zeros(SHAPE)
    kv.init(key, ones(4))
    kv.pull(key, out=out)
    assert_equal(out, 4)


@case(*((kind, key) for kind in SUMS for key in KEYS))
def push_without_optimizer_replaces_the_value(kind: str, key: Any) -> None:
    kv, out = store(kind), torch.zeros(SHAPE)
    kv.init(key, ones(7))
    kv.push(key, ones(8))
    kv.pull(key, out=out)
    assert_equal(out, 8)


@case(*((kind, i) for kind in SUMS for i in (0, 1)))
def lists_of_keys_are_pushed_and_pulled(kind: str, i: int) -> None:
    kv, keys = store(kind), LISTS[i]
    kv.init(keys, [ones(0)] * 3)
    kv.push(keys, [ones(4)] * 3)
    outs = [torch.zeros(SHAPE) for _ in keys]
    kv.pull(keys, out=outs)
    for out in outs:
        assert_equal(out, 4)


@case(*SUMS)
def list_of_tensors_is_summed(kind: str) -> None:
    kv, out = store(kind), torch.zeros(SHAPE)
    kv.init(1, ones(0))
    kv.push(1, [ones()] * 4)
    kv.pull(1, out)
    assert_equal(out, 4)


@case(*SUMS)
def key_without_push_keeps_its_value(kind: str) -> None:
    kv, out = store(kind), ones()
    kv.init([1, 2], [ones(0), ones(0)])
    kv.push(1, ones(3))
    kv.pull(2, out)
    assert_equal(out, 0)


@case(*SUMS)
def lists_of_tensors_are_summed_for_each_key(kind: str) -> None:
    kv = store(kind)
    kv.init(["x", "y"], [ones(0)] * 2)
    kv.push(["x", "y"], [[ones(2)] * 4, [ones(3)] * 4])
    outs = [[torch.zeros(SHAPE), torch.zeros(SHAPE)] for _ in "xy"]
    kv.pull(["x", "y"], out=outs)
    for tensors, expected in zip(outs, (8, 12), strict=True):
        for out in tensors:
            assert_equal(out, expected)


@case(*SUMS)
def values_of_a_repeated_key_are_summed(kind: str) -> None:
    kv, out = store(kind), torch.zeros(SHAPE)
    kv.init([1, 2], [ones(0)] * 2)
    kv.push([1, 2, 1], [ones(1), ones(5), ones(2)])
    kv.pull(1, out)
    assert_equal(out, 3)
    kv.pull(2, out)
    assert_equal(out, 5)


@case(*SUMS)
def device_values_of_a_repeated_key_are_summed(kind: str) -> None:
    kv = store(kind)
    kv.init("w", ones(0))
    kv.push(["w", "w"], [[ones(), ones()], ones(2)])
    assert_equal(kv.pull("w"), 4)


@case(*SUMS)
def repeated_key_counts_as_one_update(kind: str) -> None:
    kv = store(kind)
    kv.init("w", ones(0))
    kv.set_optimizer(torch.optim.Rprop, lr=1.0)  # its step ignores the size of the gradient
    kv.push(["w", "w"], [ones(2), ones(2)])
    assert_equal(kv.pull("w"), -1)


@case(*SUMS)
def repeated_key_in_pull_is_written_to_each_out(kind: str) -> None:
    kv, outs = store(kind), [torch.zeros(SHAPE), torch.zeros(SHAPE)]
    kv.init("w", ones(3))
    kv.pull(["w", "w"], out=outs)
    for out in outs:
        assert_equal(out, 3)


@case(*SUMS)
def pushpull_writes_to_out(kind: str) -> None:
    kv, value, out = store(kind), ones(8), torch.zeros(SHAPE)
    kv.init("3", ones(0))
    assert kv.pushpull("3", value, out=out, priority=1) is None
    assert_equal(out, 8)
    assert_equal(value, 8)


@case(*SUMS)
def pushpull_without_out_writes_the_sum_in_place(kind: str) -> None:
    kv, values = store(kind), [ones(1), ones(2), ones(3)]
    kv.init("3", ones(0))
    kv.pushpull("3", values)
    for value in values:
        assert_equal(value, 6)


@case(*SUMS)
def pushpull_of_lists_writes_the_sums_in_place(kind: str) -> None:
    kv, values = store(kind), [[ones(1), ones(2)], [ones(3), ones(4)]]
    kv.init([1, 2], [ones(0)] * 2)
    kv.pushpull([1, 2], values)
    for tensors, expected in zip(values, (3, 7), strict=True):
        for value in tensors:
            assert_equal(value, expected)


@case(*SUMS)
def pushpull_can_write_to_its_input(kind: str) -> None:
    kv, value = store(kind), ones(2)
    kv.init("3", ones(0))
    for _ in range(3):
        kv.pushpull("3", value, out=value)
    assert_equal(value, 2)


@case(*SUMS)
def pushed_tensor_can_be_changed_immediately(kind: str) -> None:
    kv, value = store(kind), ones(2)
    kv.init("3", ones(0))
    kv.push("3", value)
    value.zero_()
    assert_equal(kv.pull("3"), 2)


@case(*((kind, dtype) for kind in SUMS for dtype in ("float16", "bfloat16", "float64", "int32")))
def dtypes_are_preserved(kind: str, dtype: str) -> None:
    kv, like = store(kind), getattr(torch, dtype)
    kv.init("w", ones(1, dtype=like))
    kv.push("w", ones(3, dtype=like))
    found: Any = kv.pull("w")
    assert found.dtype is like
    assert_equal(found, 3)


@case(("float32", "float16"), ("float16", "float32"), ("float32", "float64"), ("int32", "float32"))
def pull_converts_to_the_dtype_of_out(stored: str, wanted: str) -> None:
    kv, out = store("dist_sync", 2, 3), torch.zeros(SHAPE, dtype=getattr(torch, wanted))
    kv.init("w", ones(3, dtype=getattr(torch, stored)))
    kv.pull("w", out=out)
    assert_equal(out, 3)


@case("float16", "bfloat16")
def gradients_of_workers_are_summed_in_float32(dtype: str) -> None:
    like = getattr(torch, dtype)
    step = 2.0**-11 if dtype == "float16" else 2.0**-8  # half the distance from 1 to its successor

    def work(kv: KVStore) -> torch.Tensor:
        kv.init("w", torch.zeros(2, dtype=like))
        kv.push("w", torch.full((2,), 1.0 if kv.rank == 0 else step, dtype=like))
        found: torch.Tensor = kv.pull("w")  # type: ignore[assignment]
        return found

    found = InProcess(3).run(work)
    expected = torch.full((2,), 1 + 2 * step).to(like)
    assert expected[0] > 1
    for value in found:
        assert_equal(value, expected)


@case(*((dtype, multi) for dtype in ("float16", "bfloat16") for multi in (False, True)))
def optimizer_receives_the_sum_in_float32(dtype: str, multi: bool) -> None:
    like = getattr(torch, dtype)
    step = 2.0**-11 if dtype == "float16" else 2.0**-8

    def work(kv: KVStore) -> torch.Tensor:
        kv.set_optimizer("sgd", learning_rate=-1.0, multi_precision=multi)
        kv.init("w", torch.zeros(2, dtype=like))
        kv.push("w", torch.full((2,), 1.0 if kv.rank == 0 else step, dtype=like))
        found: torch.Tensor = kv.pull("w")  # type: ignore[assignment]
        return found

    for value in InProcess(3).run(work):
        assert_equal(value, torch.full((2,), 1 + 2 * step).to(like))


@case("dist_sync", "dist_sync_device")
def gradients_of_devices_are_summed_in_float32(kind: str) -> None:
    kv, step = store(kind), 2.0**-11
    kv.init("w", torch.zeros(2, dtype=torch.float16))
    kv.push("w", [torch.full((2,), x, dtype=torch.float16) for x in (1.0, step, step)])
    assert_equal(kv.pull("w"), torch.full((2,), 1 + 2 * step).half())


@case(*((workers, servers) for workers in (2, 4) for servers in (1, 3)))
def workers_pull_the_sum_of_all_pushes(workers: int, servers: int) -> None:
    def work(kv: KVStore) -> list[Any]:
        kv.init(["3", "99"], [ones(), ones(1, (30, 40))])
        adding(kv)
        found = []
        for _ in range(3):
            kv.push(["3", "99"], [ones(kv.rank + 1), ones(kv.rank + 1, (30, 40))])
            found.append(kv.pull(["3", "99"]))
        return found

    total = workers * (workers + 1) / 2
    for seen in InProcess(workers, servers, bound=100).run(work):
        for n, (small, big) in enumerate(seen, 1):
            assert_equal(small, 1 + n * total)
            assert_equal(big, 1 + n * total)


@case(2, 4)
def init_uses_the_value_of_worker_0(workers: int) -> None:
    def work(kv: KVStore) -> Any:
        kv.init("w", ones(10 + kv.rank))
        return kv.pull("w")

    for found in InProcess(workers).run(work):
        assert_equal(found, 10)


@case(2, 3)
def all_asynchronous_pushes_are_applied(workers: int) -> None:
    def work(kv: KVStore) -> Any:
        adding(kv).init("w", ones(0))
        for _ in range(5):
            kv.push("w", ones(kv.rank + 1))
        kv.barrier()
        return kv.pull("w")

    for found in InProcess(workers, mode="dist_async").run(work):
        assert_equal(found, 5 * workers * (workers + 1) / 2)


@case()
def asynchronous_servers_need_an_optimizer() -> None:
    kv = store("dist_async")
    kv.init("w", ones())
    kv.push("w", ones())
    assert_raises_kvstore_error(lambda: kv.pull("w"), "set_optimizer")


@case(2, 3)
def pushpull_is_an_all_reduce(workers: int) -> None:
    def work(kv: KVStore) -> Any:
        kv.init("g", ones(0))
        g = ones(kv.rank + 1)
        kv.pushpull("g", g)
        return g

    for found in InProcess(workers).run(work):
        assert_equal(found, workers * (workers + 1) / 2)


@case()
def barrier_returns_on_all_workers() -> None:
    def work(kv: KVStore) -> int:
        kv._barrier()
        kv.barrier()
        return kv.rank

    assert InProcess(3).run(work) == [0, 1, 2]


@case("shape", "dtype", "key")
def invalid_list_sends_nothing(wrong: str) -> None:
    kv = store("dist_sync")
    kv.init(["a", "b"], [ones(0), ones(0)])
    second = {
        "shape": ones(1, (3,)),
        "dtype": ones().double(),
        "key": ones(),
    }[wrong]
    keys = ["a", "c"] if wrong == "key" else ["a", "b"]
    assert_raises_kvstore_error(lambda: kv.push(keys, [ones(), second]), "push of")
    assert_raises_kvstore_error(lambda: kv.pushpull(keys, [ones(), second]), "push of")
    assert_equal(kv.pull("a"), 0)


@case("dist_sync", "dist_async", "dist_sync_device", "dist_async_device")
def distributed_names_need_servers(name: str) -> None:
    assert_raises_kvstore_error(lambda: kvstore.create(name), "needs a cluster with servers")


@case("", "nccl", "horovod", "dist_sync_async", "dist", "DIST_SYNC")
def unknown_store_name_raises(name: str) -> None:
    assert_raises_kvstore_error(lambda: kvstore.create(name), "dist_sync")


@case("dist_sync_device", "dist_async_device")
def distributed_store_has_the_requested_type(name: str) -> None:
    kv = InProcess(1, mode=name).store()
    assert (kv.type, kv.rank, kv.num_workers) == (name, 0, 1)
    adding(kv).init("w", ones(0))
    kv.push("w", [ones(), ones(2)])
    assert_equal(kv.pull("w"), 3)


@case()
def rank_and_num_workers_match_the_run() -> None:
    assert InProcess(3).run(lambda kv: (kv.rank, kv.num_workers)) == [(0, 3), (1, 3), (2, 3)]


@case(*((servers, shape) for servers in (2, 3) for shape in ((1211, 3), (7,), (2, 3, 5))))
def big_arrays_are_split_and_joined(servers: int, shape: tuple[int, ...]) -> None:
    kv, value = (
        adding(store("dist_sync", servers, 5)),
        torch.arange(float(torch.Size(shape).numel())).view(shape),
    )
    kv.init("99", value)
    kv.push("99", value)
    assert len(kv.key_map()["99"]) == servers
    assert_equal(kv.pull("99"), 2 * value)
