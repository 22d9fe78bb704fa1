"""Sharding of samples among replicas: policies, uneven sizes, kinds of datasets, files."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from distkit.data import AutoShardPolicy, DistributedDataset, Plan, make_plan, split

DATA, FILE, OFF = AutoShardPolicy.DATA, AutoShardPolicy.FILE, AutoShardPolicy.OFF


def batches_by_replica(
    data: object, batch: int, replicas: int, **options: object
) -> list[list[object]]:
    """Return the batches of each replica."""
    return [
        list(DistributedDataset(data, batch, replica=r, replicas=replicas, **options))
        for r in range(replicas)
    ]


# -- the plan ----------------------------------------------------------------------


@given(st.integers(0, 500), st.integers(1, 40))
def test_shard_sizes_add_up_and_differ_by_at_most_one(batch: int, replicas: int) -> None:
    pieces = split(batch, replicas)
    assert (len(pieces), sum(pieces)) == (replicas, batch)
    assert max(pieces) - min(pieces) <= 1
    assert list(pieces) == sorted(pieces, reverse=True)


@given(st.integers(0, 90), st.integers(1, 9), st.integers(0, 20), st.none() | st.integers(0, 3))
def test_data_policy_yields_the_batches_of_one_process(
    n: int, replicas: int, extra: int, seed: int
) -> None:
    batch = replicas + extra
    plan = make_plan(batch, replicas, samples=n, policy="DATA", seed=seed)
    single = make_plan(batch, 1, samples=n, policy="DATA", seed=seed)
    assert plan.steps == single.steps == -(-n // batch)
    for step in range(plan.steps):
        rows = [plan.rows(step, r) for r in range(replicas)]
        assert tuple(map(len, rows)) == split(len(single.rows(step, 0)), replicas)
        assert sorted(i for shard in rows for i in shard) == sorted(single.rows(step, 0))
    assert sum(plan.shares) == n


@given(
    st.lists(st.integers(0, 12), min_size=1, max_size=9),
    st.integers(1, 9),
    st.integers(0, 9),
    st.none() | st.integers(0, 3),
)
def test_file_policy_uses_every_sample_once(
    sizes: list[int], replicas: int, extra: int, seed: int
) -> None:
    replicas = min(replicas, len(sizes))
    plan = Plan(
        FILE,
        replicas + extra,
        replicas,
        sum(sizes),
        tuple((str(i), n) for i, n in enumerate(sizes)),
        seed,
    )
    rows = [[plan.rows(step, r) for step in range(plan.steps)] for r in range(replicas)]
    flat = [[i for batch in batches for i in batch] for batches in rows]
    assert sorted(i for samples in flat for i in samples) == list(range(sum(sizes)))
    assert plan.shares == tuple(map(len, flat))
    for r, batches in enumerate(rows):
        full = plan.shares[r] // plan.batch_sizes[r]
        assert all(len(batch) <= plan.batch_sizes[r] for batch in batches)
        assert all(len(batch) == plan.batch_sizes[r] for batch in batches[:full])


def test_off_policy_yields_all_samples_on_every_replica() -> None:
    plan = make_plan(5, 2, samples=7, policy=OFF)
    assert plan.steps == 4
    assert [list(plan.rows(k, 0)) for k in range(4)] == [[0, 1, 2], [3, 4, 5], [6], []]
    assert [list(plan.rows(k, 1)) for k in range(4)] == [[0, 1], [2, 3], [4, 5], [6]]
    assert plan.shares == (7, 7)


def test_each_epoch_is_shuffled_differently() -> None:
    data = DistributedDataset(torch.arange(50), 8, replica=0, replicas=2, shuffle=True, seed=3)
    first, second = (torch.cat(list(data)).tolist() for _ in range(2))
    assert first != second
    data.set_epoch(0)
    next(iter(data))  # reading the first batch does not end an epoch
    assert torch.cat(list(data)).tolist() == first


# -- policies ----------------------------------------------------------------------


def test_auto_policy_shards_files_if_there_are_enough() -> None:
    files = [("a", 2), ("b", 2)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert make_plan(4, 2, samples=4, files=files).policy is FILE
        assert make_plan(4, 2, samples=4).policy is DATA
    with pytest.warns(UserWarning, match="AutoShardPolicy.AUTO uses DATA, because FILE needs"):
        assert make_plan(4, 3, samples=4, files=files).policy is DATA


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "FILE"}, r"as many files as replicas \(files: 0, replicas: 4\)"),
        ({"policy": "MINE"}, "MINE"),
        ({"global_batch": 3}, "global_batch=3 cannot be divided among 4 replicas.*global_batch=4"),
        ({"replicas": 0}, "divided among 0 replicas"),
        ({"replica": 4}, "replica=4 is out of range"),
        ({"data": (torch.ones(3), torch.ones(4))}, r"same number of rows, but have \[3, 4\]"),
    ],
)
def test_invalid_options_raise(options: dict[str, object], message: str) -> None:
    usual = {"data": torch.arange(8), "global_batch": 8, "replica": 0, "replicas": 4}
    with pytest.raises(ValueError, match=message):
        DistributedDataset(**{**usual, **options})


class Stream(IterableDataset[Tensor]):
    """An iterable dataset."""

    def __iter__(self) -> Iterator[Tensor]:
        return iter(())


@pytest.mark.parametrize("data", ["digits.npz", 7, {1, 2}, None, Stream()])
def test_invalid_dataset_raises(data: object) -> None:
    with pytest.raises(TypeError, match="expected a map-style dataset, got"):
        DistributedDataset(data, 4, replica=0, replicas=2)


# -- kinds of datasets ---------------------------------------------------------------


class Squares(Dataset[tuple[int, Tensor]]):
    """A map-style dataset."""

    def __len__(self) -> int:
        return 11

    def __getitem__(self, i: int) -> tuple[int, Tensor]:
        return i, torch.full((2,), float(i * i))


X, Y = torch.arange(11), torch.arange(11.0).square()[:, None].expand(11, 2)


@pytest.mark.parametrize(
    "data",
    [(X, Y), (X.numpy(), Y.numpy()), TensorDataset(X, Y), Squares()],
    ids=["tensors", "arrays", "TensorDataset", "map-style"],
)
@pytest.mark.parametrize("policy", ["AUTO", "OFF"])
def test_all_kinds_of_datasets_are_accepted(data: object, policy: str) -> None:
    for r, batches in enumerate(batches_by_replica(data, 5, 3, policy=policy)):
        plan = DistributedDataset((X, Y), 5, replica=r, replicas=3, policy=policy).plan
        assert len(batches) == plan.steps
        for step, batch in enumerate(batches):
            x, y = batch
            assert isinstance(batch, tuple)
            assert x.tolist() == list(plan.rows(step, r))
            assert torch.equal(y, Y[x])


def test_empty_batches_keep_the_sample_shape() -> None:
    *_, last = batches_by_replica(Squares(), 5, 3)[2]
    assert [tuple(part.shape) for part in last] == [(0,), (0, 2)]
    assert last[0].dtype == torch.int64


# -- files -------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Samples 0 to 11 in three files of 5, 1 and 6."""
    paths = [tmp_path / f"{name}.npz" for name in "abc"]
    for path, rows in zip(paths, np.split(np.arange(12), [5, 6]), strict=True):
        np.savez(path, x=rows, y=rows * 2.0)
    return paths


@pytest.mark.parametrize("shuffle", [False, True])
def test_each_replica_reads_only_its_files(files: list[Path], shuffle: bool) -> None:
    found = batches_by_replica(files, 4, 2, shuffle=shuffle)
    assert [len(batches) for batches in found] == [6, 6]  # eleven samples in batches of two
    rows = [sorted(torch.cat([x for x, _ in batches]).tolist()) for batches in found]
    assert rows == [[0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 11], [5]]
    assert all(torch.equal(2.0 * x, y) for batches in found for x, y in batches)


def test_too_few_files_are_read_by_every_replica(files: list[Path]) -> None:
    with pytest.warns(UserWarning, match="files: 3, replicas: 4"):
        found = batches_by_replica(files, 4, 4)
    assert [torch.cat([x for x, _ in batches]).tolist() for batches in found] == [
        [r, r + 4, r + 8] for r in range(4)
    ]


@pytest.mark.parametrize(
    ("name", "make", "error", "message"),
    [
        ("none.npz", lambda path: None, FileNotFoundError, "that all ranks share"),
        ("some.txt", lambda path: path.write_text("1 2"), ValueError, "numpy.savez"),
    ],
)
def test_unreadable_files_raise(
    tmp_path: Path, name: str, make: Callable[[Path], None], error: type[Exception], message: str
) -> None:
    make(tmp_path / name)
    with pytest.raises(error, match=message):
        DistributedDataset([tmp_path / name], 2, replica=0, replicas=1)
