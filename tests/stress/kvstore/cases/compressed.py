"""Gradient compression."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from distkit.kvstore import KVStore
from tests.stress.kvstore.cases.catalog import (
    adding,
    assert_equal,
    assert_raises_kvstore_error,
    case,
    ones,
    store,
)
from tests.support.in_process import InProcess

RATE = 2.0


def compressed(kind: str, threshold: float = 0.5, servers: int = 1) -> KVStore:
    """Return a store that compresses gradients, and adds ``RATE`` times their sum."""
    kv = store(kind, servers, 5)
    kv.set_gradient_compression({"type": "2bit", "threshold": threshold})
    kv.set_optimizer("sgd", learning_rate=-RATE)
    return kv


def two_bits(x: Any, threshold: float) -> Any:
    """Apply MXNet's 2-bit quantization."""
    t = np.float32(threshold)
    return np.where(x >= t, t, np.where(x <= -t, -t, np.float32(0)))


@case(*((t, servers) for t in (0.5, 1.5) for servers in (1, 3)))
def residuals_follow_mxnets_formula(t: float, servers: int) -> None:
    kv, shape = compressed("dist_sync", t, servers), (7, 5)
    kv.init("w", torch.zeros(shape))
    rng = np.random.default_rng(3)
    residual, value = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    for _ in range(5):
        g = rng.standard_normal(shape, dtype=np.float32)
        x = residual + g
        sent = two_bits(x, t)
        residual = x - sent
        value = value + np.float32(RATE) * sent
        kv.push("w", torch.from_numpy(g))
    assert_equal(kv.pull("w"), torch.from_numpy(value))


@case()
def init_is_not_compressed() -> None:
    kv = store("dist_sync")
    kv.set_gradient_compression({"type": "2bit"})
    kv.init("w", ones(0.3))
    assert_equal(kv.pull("w"), ones(0.3))


@case("dist_sync", "dist_async", "dist_sync_device")
def gradients_below_the_threshold_accumulate(kind: str) -> None:
    kv = compressed(kind)
    kv.init("w", ones(0))
    for g, expected in ((0.0, 0), (0.4, 0), (0.1, 1), (0.2, 1), (0.3, 2), (0.5, 3)):
        kv.push("w", ones(g))
        assert_equal(kv.pull("w"), expected * RATE / 2)


@case()
def default_threshold_is_one_half() -> None:
    kv = adding(store("dist_sync"))
    kv.set_gradient_compression({"type": "2bit"})
    kv.init("w", ones(0))
    kv.push("w", ones(0.6))
    assert_equal(kv.pull("w"), 0.5)


@case("dist_sync", "dist_sync_device")
def gradients_of_devices_are_summed_before_compression(kind: str) -> None:
    kv = compressed(kind)
    kv.init("w", ones(0))
    kv.push("w", [ones(0.3), ones(0.3)])
    assert_equal(kv.pull("w"), 0.5 * RATE)


@case(2, 3)
def workers_have_separate_residuals(workers: int) -> None:
    def work(kv: KVStore) -> Any:
        kv.set_gradient_compression({"type": "2bit", "threshold": 0.5})
        adding(kv).init("w", ones(0))
        for _ in range(3):
            kv.push("w", ones(0.2 * (kv.rank + 1)))
        return kv.pull("w")

    total = 0.0
    for rank in range(workers):
        residual = np.zeros(1, np.float32)
        for _ in range(3):
            x = residual + np.float32(0.2 * (rank + 1))
            sent = two_bits(x, 0.5)
            residual, total = x - sent, total + float(sent[0])
    for found in InProcess(workers).run(work):
        torch.testing.assert_close(found, ones(total))


@case()
def compression_sends_a_sixteenth_of_the_bytes() -> None:
    kv = compressed("dist_sync")
    kv.init("w", torch.zeros(64, 64))
    kv.push("w", torch.ones(64, 64))
    assert kv.traffic.sent == 64 * 64 * 4 // 16


@case()
def keys_have_separate_residuals() -> None:
    kv = compressed("dist_sync")
    kv.init([1, 2], [ones(0), ones(0)])
    kv.push([1, 2], [ones(0.4), ones(0.2)])
    before: Any = kv.pull([1, 2])
    kv.push([1, 2], [ones(0.2), ones(0.2)])
    after: Any = kv.pull([1, 2])
    assert_equal(after[0] - before[0], 0.5 * RATE)
    assert_equal(after[1] - before[1], 0)


@case("float16", "bfloat16", "float64")
def other_floating_point_dtypes_are_compressed(dtype: str) -> None:
    kv, like = compressed("dist_sync"), getattr(torch, dtype)
    kv.init("w", ones(0, dtype=like))
    kv.push("w", ones(0.75, dtype=like))
    kv.push("w", ones(0.25, dtype=like))
    assert_equal(kv.pull("w"), ones(RATE, dtype=like))


@case("float", "list")
def pushpull_is_compressed(how: str) -> None:
    kv = store("dist_sync")
    kv.set_gradient_compression({"type": "2bit", "threshold": 0.5})
    kv.init("w", ones(0))
    value = ones(0.7) if how == "float" else [ones(0.3), ones(0.4)]
    kv.pushpull("w", value)
    for tensor in value if isinstance(value, list) else [value]:
        assert_equal(tensor, 0.5)


@case(
    {"type": "1bit"},
    {},
    {"type": "2bit", "threshold": 0},
    {"type": "2bit", "threshold": -1},
    {"type": "2bit", "treshold": 1},
    {"type": "2bit", "threshold": "x"},
)
def invalid_compression_parameters_raise(params: dict[str, Any]) -> None:
    assert_raises_kvstore_error(
        lambda: store("dist_sync").set_gradient_compression(params), "Pass", "2bit"
    )


@case()
def integers_are_not_compressed() -> None:
    kv = store("dist_sync")
    kv.set_gradient_compression({"type": "2bit"})
    kv.init(["w", "n"], [ones(0), torch.ones(2, dtype=torch.int64)])
    kv.push(["w", "n"], [ones(), torch.tensor([3, -7])])
    assert_equal(kv.pull("w"), 0.5)
    assert kv.pull("n").tolist() == [3, -7]
