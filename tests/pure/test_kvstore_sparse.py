"""Row-sparse tensors and rules on their way: nothing is lost, and nothing hostile gets through."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distkit.consistency import Synchronous
from distkit.errors import KVStoreError
from distkit.kvstore.protocol.entry import Entry
from distkit.kvstore.protocol.messages import GetState, Init, SetOptimizer
from distkit.kvstore.protocol.optimizer import (
    _BY_NAME,
    _TORCH,
    Optimizer,
    Turn,
    create,
    from_spec,
    to_spec,
)
from distkit.kvstore.protocol.placement import place
from distkit.kvstore.protocol.server import KVServer
from distkit.kvstore.protocol.sparse import codec_of, pack, rows_of, unpack
from distkit.kvstore.protocol.wire import decode, encode
from distkit.kvstore.testing import InProcess


@given(
    st.lists(st.integers(0, 6), max_size=9),
    st.sampled_from([(7,), (7, 3), (7, 2, 2)]),
    st.integers(1, 4),
    st.integers(1, 3),
)
def test_parts_of_rows_are_parts_of_the_dense_sum(ids, shape, servers: int, tensors: int) -> None:
    values = torch.arange(float(len(ids) * math.prod(shape[1:]))).view(len(ids), *shape[1:])
    sparse = torch.sparse_coo_tensor(
        torch.tensor([ids], dtype=torch.int64).view(1, -1), values, shape, check_invariants=True
    )
    rows = rows_of([sparse] * tensors)
    dense = (tensors * sparse.to_dense()).view(-1)
    for part in place("w", dense.numel(), servers, 1):
        found = unpack(codec_of(rows), pack(rows, part))
        assert torch.equal(found.to_dense(), dense[part.start : part.stop])


@given(st.binary(max_size=64), st.sampled_from(["rows:float32", "rows:int8", "rows:save", "rows:"]))
def test_random_bytes_are_rows_or_refused(data: bytes, codec: str) -> None:
    try:
        found = unpack(codec, torch.tensor(list(data), dtype=torch.uint8))
        assert found.layout is torch.sparse_coo
    except KVStoreError:
        pass


def packed(size: int, ranges: list[int], values: int) -> torch.Tensor:
    head = torch.tensor([size, len(ranges) // 2, *ranges]).view(torch.uint8)
    return torch.cat([head, torch.ones(values).view(torch.uint8)])


@pytest.mark.parametrize(
    ("size", "ranges", "values"),
    [
        (4, [0, 5], 5),
        (4, [-1, 1], 2),
        (4, [2, 1], 0),
        (4, [0, 2, 1, 3], 4),
        (4, [0, 2], 3),
        (4, [2, 3, 0, 1], 2),
        (-1, [], 0),
    ],
)
def test_ranges_that_do_not_fit_are_refused(size: int, ranges: list[int], values: int) -> None:
    with pytest.raises(KVStoreError):
        unpack("rows:float32", packed(size, ranges, values))


def test_a_small_message_makes_no_large_array() -> None:
    init = Init(0, 0, 0, "w", (4,), "float32", packed(1 << 50, [0, 1], 1), "rows:float32")
    with pytest.raises(KVStoreError, match="with other rows"):
        Entry.of(init)


# -- rules ------------------------------------------------------------------------

NAMES = [*_BY_NAME, *(f"torch.optim.{name}" for name in _TORCH)]


@pytest.mark.parametrize("name", NAMES)
def test_a_rule_arrives_as_it_left(name: str) -> None:
    rule = create(name, lr_mult={"w": 2.0, 3: 0.5}, clip_gradient=1.0)
    sent = SetOptimizer(0, 0, 0, *to_spec(rule))
    (got,) = decode([memoryview(bytearray(f)) for f in encode(sent)]).messages
    assert from_spec(got.name, got.options) == rule


def hostile() -> list[tuple[str, dict[str, object]]]:
    name, plain = to_spec(create("sgd"))
    torchs, theirs = to_spec(create("torch.optim.Adam"))
    return [
        ("os.system", plain),
        ("torch.optim.sgd", plain),
        ("torch.optim.Optimizer", plain),
        ("torch.optim.__builtins__", plain),
        ("__class__", plain),
        ("", plain),
        (name, {"learning_rate": "1"}),
        (name, {"momentum": [1]}),
        (name, {"__class__": 1}),
        (name, {"lr_mult": 3}),
        (name, {"lr_mult": [["w", "x"]]}),
        (name, {"lr_mult": [[[], 1]]}),
        (name, {"lr_scheduler": ["os.system", {}]}),
        (name, {"lr_scheduler": 5}),
        (name, {"lr_scheduler": ["FactorScheduler", {"step": "x"}]}),
        (name, {"options": {"learning_rate": 3}, "learning_rate": 1}),
        (torchs, theirs | {"options": 3}),
        (torchs, theirs | {"options": {"betas": "x"}}),
        (torchs, theirs | {"options": {"params": [1]}}),
        (torchs, theirs | {"learning_rate": None}),
        (torchs, theirs | {"options": {"betas": [5, 5]}}),
        ("adam", {"beta1": 1.0}),
        ("adam", {"beta2": 2}),
        ("adam", {"learning_rate": True, "x": 1}),
        (name, {"lr_scheduler": ["PolyScheduler", {"max_update": 3, "pwr": -1}]}),
    ]


@pytest.mark.parametrize(("name", "options"), hostile())
def test_a_hostile_rule_is_refused(name: str, options: dict[str, object]) -> None:
    server = KVServer(Synchronous(), range(1))
    (answer,) = server.handle(SetOptimizer(0, 0, 0, name, json.loads(json.dumps(options))))
    assert type(answer).__name__ == "Error"
    assert server.optimizer is None


@pytest.mark.parametrize("name", NAMES)
@given(steps=st.integers(1, 4))
def test_rows_are_updated_as_if_the_rest_were_not_there(name: str, steps: int) -> None:
    rule: Optimizer = create(name)
    if rule.whole:
        return
    at, value = torch.tensor([1, 3, 4]), torch.linspace(-1, 1, 6)
    full, part = value, value[at]
    kept, mine = {}, {}
    for n in range(steps):
        g = torch.linspace(0.5, 2, 3) * (n + 1)
        sparse = torch.sparse_coo_tensor(at[None], g, (6,), check_invariants=True)
        turn = (0, n + 1, n + 1)
        full, kept = rule.apply(full, sparse, kept, Turn(*turn))
        part, mine = rule.apply(part, g, mine, Turn(*turn))
    assert torch.equal(full[at], part)
    assert torch.equal(full[[0, 2, 5]], value[[0, 2, 5]])


def test_a_state_that_is_asked_for_does_not_change_any_more() -> None:
    there = InProcess()
    kv = there.store()
    kv.set_optimizer("torch.optim.Adam")
    kv.init("w", torch.zeros(4))
    kv.push("w", torch.ones(4))
    entry = there.nodes[1].entries["w"]
    before = entry.slots["exp_avg"]
    kept = before.clone()
    kv.pull("w")
    (answer,) = there.nodes[1].handle(GetState(0, 0, 99, "w", "exp_avg"))
    kv.push("w", torch.ones(4))
    kv.pull("w")
    assert torch.equal(answer.value, kept)
