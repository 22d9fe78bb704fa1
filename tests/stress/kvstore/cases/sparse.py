"""Row-sparse tensors: ``init``, ``push``, ``pull`` and ``row_sparse_pull``."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from distkit.kvstore import KVStore
from distkit.kvstore.protocol.messages import Push
from distkit.kvstore.testing import InProcess
from tests.stress.kvstore.cases.catalogue import (
    ALONE,
    SHAPE,
    adding,
    case,
    ones,
    refused,
    same,
    store,
)

SUMS = "local", "device", "dist_sync"


def rows(*ids: int, factor: float = 1.0, shape: tuple[int, ...] = SHAPE) -> torch.Tensor:
    """A sparse tensor with these rows."""
    values = torch.full((len(ids), *shape[1:]), float(factor))
    numbers = torch.tensor([ids], dtype=torch.int64).view(1, -1)
    return torch.sparse_coo_tensor(numbers, values, shape, check_invariants=True)


def empty(shape: tuple[int, ...] = SHAPE, dtype: Any = None) -> torch.Tensor:
    """A sparse tensor without rows."""
    return torch.zeros(shape, dtype=dtype).to_sparse(1)


@case(*((kind, servers) for kind in ALONE for servers in (1, 3) if servers == 1 or "dist" in kind))
def a_sparse_init_is_its_dense_value(kind: str, servers: int) -> None:
    kv = store(kind, servers, 5)
    kv.init("e", rows(1, 3, factor=2))
    same(kv.pull("e"), rows(1, 3, factor=2).to_dense())


@case(*((kind, servers) for kind in SUMS for servers in (1, 3) if servers == 1 or "dist" in kind))
def without_an_optimizer_the_rows_are_the_value(kind: str, servers: int) -> None:
    kv = store(kind, servers, 5)
    kv.init("e", ones(0))
    kv.push("e", rows(0, 2, factor=3))
    same(kv.pull("e"), rows(0, 2, factor=3).to_dense())


@case(*((kind, servers) for kind in ALONE for servers in (1, 3) if servers == 1 or "dist" in kind))
def rows_are_added(kind: str, servers: int) -> None:
    kv = adding(store(kind, servers, 5))
    kv.init("e", ones())
    for _ in range(3):
        kv.push("e", rows(1, 2))
    expected = ones()
    expected[1:3] += 3
    same(kv.pull("e"), expected)


@case(*SUMS)
def rows_of_devices_are_summed(kind: str) -> None:
    kv = store(kind)
    kv.init("e", ones(0))
    kv.push("e", [rows(0, 1), rows(1, 2), rows(3)])
    expected = torch.tensor([1.0, 2, 1, 1])[:, None].expand(SHAPE)
    same(kv.pull("e"), expected)


@case(*SUMS)
def rows_given_twice_in_a_tensor_are_summed(kind: str) -> None:
    kv = store(kind)
    kv.init("e", ones(0))
    kv.push("e", rows(1, 1, 1))
    same(kv.pull("e"), rows(1, factor=3).to_dense())


@case(*SUMS)
def dense_and_sparse_gradients_of_a_key_are_summed(kind: str) -> None:
    kv = store(kind)
    kv.init("e", ones(0))
    kv.push("e", [ones(), rows(2)])
    same(kv.pull("e"), ones() + rows(2).to_dense())


@case(*((workers, servers) for workers in (2, 3) for servers in (1, 2)))
def rows_of_workers_are_summed(workers: int, servers: int) -> None:
    def work(kv: KVStore) -> Any:
        adding(kv).init("9", ones())
        for _ in range(2):
            kv.push("9", rows(kv.rank, 3, factor=kv.rank + 1))
        return kv.pull("9")

    expected = ones()
    for rank in range(workers):
        expected[rank] += 2 * (rank + 1)
        expected[3] += 2 * (rank + 1)
    for found in InProcess(workers, servers, bound=5).run(work):
        same(found, expected)


@case(2, 3)
def workers_with_rows_and_workers_without_meet(workers: int) -> None:
    def work(kv: KVStore) -> Any:
        kv.init("9", ones(0))
        kv.push("9", rows(1) if kv.rank else ones())
        return kv.pull("9")

    for found in InProcess(workers).run(work):
        same(found, ones() + (workers - 1) * rows(1).to_dense())


@case(1, 2)
def empty_gradients_complete_a_round(servers: int) -> None:
    def work(kv: KVStore) -> Any:
        adding(kv).init("9", ones())
        kv.push("9", empty())
        return kv.pull("9")

    for found in InProcess(2, servers, bound=5).run(work):
        same(found, 1)


@case(*((kind, dtype) for kind in SUMS for dtype in ("float16", "float64")))
def rows_of_other_dtypes(kind: str, dtype: str) -> None:
    kv, like = adding(store(kind)), getattr(torch, dtype)
    kv.init("e", ones(dtype=like))
    kv.push("e", rows(1).to(like))
    found: Any = kv.pull("e")
    assert found.dtype is like
    same(found, ones(dtype=like) + rows(1).to(like).to_dense())


@case("coo", "elements", "csr")
def every_sparse_layout_is_taken(layout: str) -> None:
    value = torch.zeros(SHAPE)
    value[1, 2], value[3, 0] = 5, 7
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's: csr is new
        sparse = (
            value.to_sparse_csr()
            if layout == "csr"
            else value.to_sparse(1 if layout == "coo" else 2)
        )
        kv = store("dist_sync")
        kv.init("e", ones(0))
        kv.push("e", sparse)
    same(kv.pull("e"), value)


@case((8,), (8, 1), (8, 2, 3))
def rows_of_any_shape(*shape: int) -> None:
    kv = adding(store("dist_sync", 3, 2))
    kv.init("e", torch.ones(shape))
    kv.push("e", rows(0, 5, shape=shape))
    expected = torch.ones(shape)
    expected[[0, 5]] += 1
    same(kv.pull("e"), expected)
    same(
        kv.row_sparse_pull("e", row_ids=torch.tensor([5])),
        rows(5, factor=2, shape=shape).to_dense(),
    )


@case(*((kind, servers) for kind in ALONE for servers in (1, 3) if servers == 1 or "dist" in kind))
def row_sparse_pull_fills_a_sparse_tensor(kind: str, servers: int) -> None:
    kv, out = store(kind, servers, 5), rows(0, 1, factor=9)
    kv.init("e", ones())
    kv.row_sparse_pull("e", out=out, row_ids=torch.tensor([0, 2]))
    same(out, rows(0, 2).to_dense())


@case(*ALONE)
def row_ids_may_repeat_and_come_in_any_order(kind: str) -> None:
    kv, out = store(kind), empty()
    kv.init("e", torch.arange(16.0).view(SHAPE))
    kv.row_sparse_pull("e", out=out, row_ids=torch.tensor([[3, 1], [3, 3]]))
    expected = torch.arange(16.0).view(SHAPE).clone()
    expected[[0, 2]] = 0
    same(out, expected)


@case("float32", "int32", "int64")
def row_ids_of_any_dtype(dtype: str) -> None:
    kv, out = store("local"), empty()
    kv.init("e", ones())
    kv.row_sparse_pull("e", out=out, row_ids=torch.tensor([2, 0]).to(getattr(torch, dtype)))
    same(out, rows(0, 2).to_dense())


@case(*((kind, servers) for kind in ALONE for servers in (1, 3) if servers == 1 or "dist" in kind))
def empty_row_ids_give_zeros(kind: str, servers: int) -> None:
    kv, out = store(kind, servers, 5), rows(0, 1)
    kv.init("e", ones())
    kv.row_sparse_pull("e", out=out, row_ids=torch.tensor([]))
    same(out, 0)
    found: Any = kv.row_sparse_pull("e", row_ids=torch.tensor([], dtype=torch.int64))
    assert found.shape == SHAPE and found._nnz() == 0


@case(*ALONE)
def one_row_id_serves_all_outputs(kind: str) -> None:
    kv, outs = store(kind), [empty(), empty(), empty()]
    kv.init("e", ones())
    kv.row_sparse_pull("e", out=outs, row_ids=torch.tensor([1]))
    for out in outs:
        same(out, rows(1).to_dense())


@case(*ALONE)
def each_output_has_its_row_ids(kind: str) -> None:
    kv, outs = store(kind), [empty() for _ in range(4)]
    kv.init("e", ones())
    ids = [torch.tensor([i, 3]) for i in range(4)]
    kv.row_sparse_pull("e", out=outs, row_ids=ids)
    for out, mine in zip(outs, ids, strict=True):
        same(out, rows(*set(mine.tolist())).to_dense())


@case(*ALONE)
def keys_and_devices_have_their_row_ids(kind: str) -> None:
    kv, keys = store(kind), ["b", "c"]
    kv.init(keys, [ones(2), ones(3)])
    outs = [[empty(), empty()] for _ in keys]
    every = torch.arange(4)
    kv.row_sparse_pull(keys, out=outs, row_ids=[[every, torch.tensor([1])]] * 2, priority=[0, 1])
    for tensors, value in zip(outs, (2, 3), strict=True):
        same(tensors[0], value)
        same(tensors[1], rows(1, factor=value).to_dense())


@case("missing", "count", "range", "negative")
def row_ids_that_do_not_fit_are_refused(wrong: str) -> None:
    kv, out = store("dist_sync"), [empty(), empty()]
    kv.init("e", ones())
    ids = {
        "missing": None,
        "count": [torch.tensor([1])] * 3,
        "range": torch.tensor([4]),
        "negative": torch.tensor([-1]),
    }[wrong]
    refused(lambda: kv.row_sparse_pull("e", out=out, row_ids=ids), "row")


@case(*ALONE)
def pull_ignores_sparse_outputs_and_says_so(kind: str) -> None:
    kv, out = store(kind), rows(0, factor=2)
    kv.init("e", ones())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        kv.pull("e", out=out)
        kv.pull("e", out=out)
    same(out, rows(0, factor=2).to_dense())
    assert len(said) == 1 and "row_sparse_pull" in str(said[0].message)


@case(*ALONE)
def pull_fills_sparse_outputs_when_told(kind: str) -> None:
    kv, outs = store(kind), [empty(), torch.zeros(SHAPE)]
    kv.init("e", ones(3))
    kv.pull("e", out=outs, ignore_sparse=False)
    same(outs[0], 3)
    same(outs[1], 3)


@case("float16", "float64")
def sparse_outputs_of_another_dtype(dtype: str) -> None:
    kv, out = store("local"), empty(dtype=getattr(torch, dtype))
    kv.init("e", ones(3))
    kv.row_sparse_pull("e", out=out, row_ids=torch.tensor([1]))
    assert out.dtype is getattr(torch, dtype)
    same(out.float(), rows(1, factor=3).to_dense())


@case(1, 4)
def only_the_touched_rows_travel(servers: int) -> None:
    there, shape = InProcess(1, servers, bound=10), (10_000, 16)
    kv = adding(there.store())
    kv.init("e", empty(shape))
    kv.push("e", rows(1, 9_999, shape=shape))
    kv.row_sparse_pull("e", row_ids=torch.tensor([1, 5000]))
    sent = sum(nbytes for _, _, nbytes in there.asked)
    assert sent < 4096 + 1024 * servers, f"{sent} bytes for 2 rows of 64"
    same(kv.row_sparse_pull("e", row_ids=torch.tensor([1, 2])), rows(1, shape=shape).to_dense())


@case(1, 2)
def a_gradient_of_pulled_rows_is_of_their_version(servers: int) -> None:
    there = InProcess(1, servers, bound=5)
    kv = adding(there.store())
    kv.init("e", ones())
    for _ in range(3):
        kv.row_sparse_pull("e", row_ids=torch.arange(4))
        kv.push("e", rows(0, 3))
    pushed = [r.version for _, r, _ in there.asked if isinstance(r, Push)]
    assert pushed == [n for n in range(3) for _ in range(servers)]


@case()
def sparse_gradients_are_not_compressed() -> None:
    kv = store("dist_sync")
    kv.set_gradient_compression({"type": "2bit"})
    kv.init("e", ones())
    refused(lambda: kv.push("e", rows(1)), "cannot be compressed")


@case()
def what_has_no_rows_has_no_sparse_gradient() -> None:
    kv = store("local")
    kv.init("s", torch.tensor(1.0))
    refused(lambda: kv.push("s", rows(1)), "push of 's'")


@case(True, False)
def lazy_updates_leave_other_rows_alone(lazy: bool) -> None:
    kv = store("dist_sync", 2, 5)
    kv.set_optimizer("sgd", learning_rate=1.0, momentum=0.5, wd=0.5, lazy_update=lazy)
    kv.init("e", ones())
    kv.push("e", rows(1))
    kv.push("e", rows(1))
    w, m, w0, m0 = 1.0, 0.0, 1.0, 0.0
    for _ in range(2):
        m = 0.5 * m - (1 + 0.5 * w)
        m0 = 0.5 * m0 - 0.5 * w0
        w, w0 = w + m, w0 + m0
    expected = ones(1.0 if lazy else w0)
    expected[1] = w
    same(kv.pull("e"), expected)


@case(
    "sgd",
    "adam",
    "adagrad",
    "rmsprop",
    "ftrl",
    "torch.optim.SGD",
    "torch.optim.Adam",
    "torch.optim.SparseAdam",
    "torch.optim.Adagrad",
)
def touched_rows_are_as_with_dense_gradients(name: str) -> None:
    found = []
    for dense in (False, True):
        kv = store("dist_sync", 3, 5)
        kv.set_optimizer(name)
        kv.init("e", ones())
        for n in range(1, 4):
            gradient = rows(0, 1, 2, 3, factor=n / 2)
            kv.push("e", gradient.to_dense() if dense else gradient)
        found.append(kv.pull("e"))
    same(found[0], found[1])


@case(*((kind, name) for kind in SUMS for name in ("sgd", "adam")))
def untouched_rows_keep_their_bits(kind: str, name: str) -> None:
    kv, value = store(kind), torch.rand(SHAPE)
    kv.set_optimizer(name, wd=0.1)
    kv.init("e", value)
    kv.push("e", rows(2))
    found: Any = kv.pull("e")
    keep = [0, 1, 3]
    same(found[keep], value[keep])
    assert not torch.equal(found[2], value[2])
