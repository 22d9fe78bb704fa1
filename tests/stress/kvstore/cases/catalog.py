"""The catalog of cases: small functions that check a store against MXNet's semantics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from distkit import kvstore
from distkit.kvstore import KVStore
from tests.support.in_process import InProcess

SHAPE = (4, 4)
#: The kinds of stores for cases with a single worker.
SINGLE_WORKER = ("dist_sync", "dist_async")


class Case(NamedTuple):
    """An interface, a description, and a function that raises if the behavior differs."""

    interface: str
    name: str
    run: Callable[[], None]


CASES: list[Case] = []


def case(*variants: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add a function to the catalog, once for each variant of its arguments."""

    def add(function: Callable[..., None]) -> Callable[..., None]:
        interface = function.__module__.rpartition(".")[2]
        words = function.__name__.replace("_", " ")
        for variant in variants or [()]:
            given = variant if isinstance(variant, tuple) else (variant,)
            name = f"{words} [{', '.join(map(str, given))}]" if given else words
            CASES.append(Case(interface, name, partial(function, *given)))
        return function

    return add


def store(kind: str, servers: int = 1, bound: int = 1_000_000, **options: Any) -> KVStore:
    """Return a store of one worker."""
    return InProcess(1, servers, kind, bound).store(**options)


def adding(kv: KVStore) -> KVStore:
    """Set an optimizer that adds pushed values, and return the store."""
    kv.set_optimizer(kvstore.SGD(learning_rate=-1))
    return kv


def ones(factor: float = 1.0, shape: Sequence[int] = SHAPE, dtype: Any = None) -> torch.Tensor:
    """Return a tensor filled with one number."""
    return torch.full(tuple(shape), factor, dtype=dtype or torch.float32)


def assert_equal(found: Any, expected: Any) -> None:
    """Assert that a tensor equals another, or is filled with a number."""
    if found.layout is not torch.strided:
        found = found.to_dense()
    if not isinstance(expected, torch.Tensor):
        expected = torch.full_like(found, expected)
    assert torch.equal(found, expected), f"{found} is not {expected}"


def assert_close(found: Any, expected: Any) -> None:
    """Assert that tensors are equal up to rounding."""
    torch.testing.assert_close(
        found, torch.as_tensor(expected, dtype=found.dtype), rtol=2e-5, atol=1e-6
    )


def assert_raises_kvstore_error(call: Callable[[], object], *texts: str) -> None:
    """Assert that a call raises a KVStoreError whose message contains all of these texts."""
    from distkit.errors import KVStoreError

    try:
        call()
    except KVStoreError as e:
        missing = [text for text in texts if text not in str(e)]
        assert not missing, f"{e} lacks {missing}"
        return
    raise AssertionError("no KVStoreError was raised")
