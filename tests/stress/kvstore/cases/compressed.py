"""Gradient compression."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from distkit.kvstore import KVStore
from distkit.kvstore.testing import InProcess
from tests.stress.kvstore.cases.catalogue import adding, case, ones, refused, same, store

RATE = 2.0


def compressed(kind: str, compression: str, threshold: float = 0.5, servers: int = 1) -> KVStore:
    """A store that compresses, and adds ``RATE`` times what it gets."""
    kv = store(kind, servers, 5)
    kv.set_gradient_compression({"type": compression, "threshold": threshold})
    kv.set_optimizer("sgd", learning_rate=-RATE)
    return kv


def one_bit(x: Any, threshold: float) -> Any:
    """MXNet's, element by element."""
    return np.where(x > threshold, np.float32(1), np.float32(-1))


def two_bits(x: Any, threshold: float) -> Any:
    """MXNet's, element by element."""
    t = np.float32(threshold)
    return np.where(x >= t, t, np.where(x <= -t, -t, np.float32(0)))


RULES = {"1bit": one_bit, "2bit": two_bits}


@case(
    *(
        (kind, bits, t, servers)
        for bits in RULES
        for t in (0.5, 1.5)
        for kind, servers in (("device", 1), ("dist_sync", 1), ("dist_sync", 3))
    )
)
def random_gradients_and_their_residuals(kind: str, bits: str, t: float, servers: int) -> None:
    kv, shape = compressed(kind, bits, t, servers), (7, 5)
    kv.init("w", torch.zeros(shape))
    draws = np.random.default_rng(3)
    residual, value = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    for _ in range(5):
        g = draws.standard_normal(shape, dtype=np.float32)
        x = residual + g
        said = RULES[bits](x, t)
        residual = x - said
        value = value + np.float32(RATE) * said
        kv.push("w", torch.from_numpy(g))
    same(kv.pull("w"), torch.from_numpy(value))


@case("1bit", "2bit", "1bit_means", "topk")
def init_is_not_compressed(bits: str) -> None:
    kv = store("dist_sync")
    kv.set_gradient_compression({"type": bits})
    kv.init("w", ones(0.3))
    same(kv.pull("w"), ones(0.3))


@case("device", "dist_sync", "dist_async", "dist_device_sync")
def two_bits_send_nothing_below_the_threshold(kind: str) -> None:
    kv = compressed(kind, "2bit")
    kv.init("w", ones(0))
    for g, expected in ((0.0, 0), (0.4, 0), (0.1, 1), (0.2, 1), (0.3, 2), (0.5, 3)):
        kv.push("w", ones(g))
        same(kv.pull("w"), expected * RATE / 2)


@case("device", "dist_sync", "dist_async")
def one_bit_sends_plus_or_minus_one(kind: str) -> None:
    kv = compressed(kind, "1bit")
    kv.init("w", ones(0))
    kv.push("w", ones())
    same(kv.pull("w"), RATE)
    kv.push("w", ones(-1))
    same(kv.pull("w"), 0)


@case(*((t, kind) for t in (0.5, 2.5, -0.5) for kind in ("device", "dist_sync")))
def one_bits_residual_is_less_by_what_was_sent(t: float, kind: str) -> None:
    kv = compressed(kind, "1bit", t)
    kv.init("w", ones(0))
    value = residual = 0.0
    for g in (2.0, 0.0, -2.0, 0.25, 0.25):
        a = g + residual
        said = 1 if a > t else -1
        residual, value = a - said, value + RATE * said
        kv.push("w", ones(g))
        same(kv.pull("w"), value)


@case("1bit", "2bit")
def what_equals_the_threshold(bits: str) -> None:
    kv = compressed("dist_sync", bits)
    kv.init("w", ones(0))
    kv.push("w", ones(0.5))
    same(kv.pull("w"), -RATE if bits == "1bit" else 0.5 * RATE)


@case("1bit", "2bit")
def the_default_threshold_is_a_half(bits: str) -> None:
    kv = adding(store("dist_sync"))
    kv.set_gradient_compression({"type": bits})
    kv.init("w", ones(0))
    kv.push("w", ones(0.6))
    same(kv.pull("w"), 1 if bits == "1bit" else 0.5)


@case("1bit", "2bit")
def each_device_has_a_residual(bits: str) -> None:
    kv = adding(store("device"))
    kv.set_gradient_compression({"type": bits, "threshold": 0.5})
    kv.init("w", ones(0))
    given, value, residual = ((0.3, 0.7), (0.3, 0.1), (0.0, 0.4)), np.float32(0), np.zeros(2)
    for pair in given:
        x = (residual + np.array(pair)).astype(np.float32)
        said = RULES[bits](x, 0.5)
        residual, value = x - said, value + said.sum()
        kv.push("w", [ones(pair[0]), ones(pair[1])])
        same(kv.pull("w"), float(value))


@case("dist_sync", "dist_device_sync")
def devices_of_a_worker_are_added_before_they_are_compressed(kind: str) -> None:
    kv = compressed(kind, "2bit")
    kv.init("w", ones(0))
    kv.push("w", [ones(0.3), ones(0.3)])
    same(kv.pull("w"), 0.5 * RATE)


@case(*((bits, workers) for bits in RULES for workers in (2, 3)))
def workers_compress_each_for_itself(bits: str, workers: int) -> None:
    def work(kv: KVStore) -> Any:
        kv.set_gradient_compression({"type": bits, "threshold": 0.5})
        adding(kv).init("w", ones(0))
        for _ in range(3):
            kv.push("w", ones(0.2 * (kv.rank + 1)))
        return kv.pull("w")

    total = 0.0
    for rank in range(workers):
        residual = np.zeros(1, np.float32)
        for _ in range(3):
            x = residual + np.float32(0.2 * (rank + 1))
            said = RULES[bits](x, 0.5)
            residual, total = x - said, total + float(said[0])
    for found in InProcess(workers).run(work):
        torch.testing.assert_close(found, ones(total))


@case(("1bit", 32), ("2bit", 16))
def so_much_less_is_sent(bits: str, times: int) -> None:
    kv = compressed("dist_sync", bits)
    kv.init("w", torch.zeros(64, 64))
    kv.push("w", torch.ones(64, 64))
    assert kv.traffic.sent == 64 * 64 * 4 // times


@case("1bit", "2bit")
def each_key_has_a_residual(bits: str) -> None:
    kv = compressed("dist_sync", bits)
    kv.init([1, 2], [ones(0), ones(0)])
    kv.push([1, 2], [ones(0.4), ones(0.2)])
    before: Any = kv.pull([1, 2])
    kv.push([1, 2], [ones(0.2), ones(0.2)])
    after: Any = kv.pull([1, 2])
    if bits == "2bit":
        same(after[0] - before[0], 0.5 * RATE)
        same(after[1] - before[1], 0)
    else:
        same(after[0] - before[0], RATE)
        same(after[1] - before[1], RATE)


@case("float16", "bfloat16", "float64")
def other_floats_are_compressed(dtype: str) -> None:
    kv, like = compressed("dist_sync", "2bit"), getattr(torch, dtype)
    kv.init("w", ones(0, dtype=like))
    kv.push("w", ones(0.75, dtype=like))
    kv.push("w", ones(0.25, dtype=like))
    same(kv.pull("w"), ones(RATE, dtype=like))


@case("float", "list")
def pushpull_is_compressed_too(how: str) -> None:
    kv = store("dist_sync")
    kv.set_gradient_compression({"type": "2bit", "threshold": 0.5})
    kv.init("w", ones(0))
    value = ones(0.7) if how == "float" else [ones(0.3), ones(0.4)]
    kv.pushpull("w", value)
    for tensor in value if isinstance(value, list) else [value]:
        same(tensor, 0.5)


@case(
    {"type": "3bit"},
    {},
    {"type": "2bit", "threshold": 0},
    {"type": "2bit", "threshold": -1},
    {"type": "2bit", "treshold": 1},
    {"type": "1bit", "threshold": "x"},
)
def parameters_that_there_are_not(params: dict[str, Any]) -> None:
    refused(lambda: store("dist_sync").set_gradient_compression(params), "set_gradient_compression")


@case()
def a_local_store_does_not_compress() -> None:
    refused(lambda: store("local").set_gradient_compression({"type": "2bit"}), "device")


@case()
def whole_numbers_are_not_compressed() -> None:
    kv = store("dist_sync")
    kv.set_gradient_compression({"type": "2bit"})
    kv.init(["w", "n"], [ones(0), torch.ones(2, dtype=torch.int64)])
    refused(lambda: kv.push(["w", "n"], [ones(), torch.ones(2, dtype=torch.int64)]), "int64")
    same(kv.pull("w"), 0)


@case()
def the_means_of_both_halves_have_a_name_of_their_own() -> None:
    kv = adding(store("dist_sync"))
    kv.set_gradient_compression({"type": "1bit_means"})
    kv.init("w", torch.zeros(4))
    kv.push("w", torch.tensor([1.0, 3.0, -2.0, -4.0]))
    same(kv.pull("w"), torch.tensor([2.0, 2.0, -3.0, -3.0]))
