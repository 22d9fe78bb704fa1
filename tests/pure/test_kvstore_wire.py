"""Messages survive the wire to the bit; anything else is refused cleanly."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distkit.errors import KVStoreError
from distkit.kvstore import messages as m
from distkit.kvstore.wire import DTYPES, decode, encode

KEYS = st.integers() | st.text()
COUNTS = st.integers(0, 2**40)
SHAPES = st.lists(COUNTS, max_size=4).map(tuple)
TENSORS = st.builds(
    lambda dtype, n, data: torch.frombuffer(
        bytearray((data * 2048)[: n * dtype.itemsize]) or bytearray(1), dtype=torch.uint8
    )[: n * dtype.itemsize].view(dtype),
    st.sampled_from([d for d in DTYPES.values() if d is not torch.bool]),
    st.integers(0, 100),
    st.binary(min_size=1),
) | st.lists(st.booleans()).map(torch.tensor).map(torch.Tensor.bool)
BY_TYPE: dict[str, st.SearchStrategy[Any]] = {
    "int": COUNTS,
    "str": st.text(),
    "Key": KEYS,
    "tuple[int, ...]": SHAPES,
    "Tensor": TENSORS,
    "Tensor | None": TENSORS | st.none(),
    "dict[int, str]": st.dictionaries(COUNTS, st.text(), max_size=4),
    "dict[str, float]": st.dictionaries(st.text(), st.floats(allow_nan=False), max_size=4),
}
KINDS = [m.Register, m.Barrier, m.AddressBook, m.RollCall, m.Init, m.Push, m.Pull, m.Describe,
         m.SetOptimizer, m.Reply, m.Error]  # fmt: skip
MESSAGES = st.one_of(
    [st.builds(kind, *(BY_TYPE[str(f.type)] for f in fields(kind))) for kind in KINDS]
)


def bits(value: object) -> object:
    """A tensor as what identifies it to the bit."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.dtype, value.shape, value.view(torch.uint8).tolist()


def travelled(message: m.Message) -> m.Message:
    return decode([memoryview(bytearray(frame)) for frame in encode(message)])


@given(MESSAGES)
def test_round_trip(message: m.Message) -> None:
    other = travelled(message)
    assert type(other) is type(message)
    for f in fields(message):
        assert bits(getattr(other, f.name)) == bits(getattr(message, f.name))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@pytest.mark.parametrize("size", [0, 1, 1000])
def test_every_dtype_travels(dtype: torch.dtype, size: int) -> None:
    value = (torch.arange(size) % 2).to(dtype)
    other = travelled(m.Push(0, 0, 0, "w", (size,), 0, value))
    assert bits(other.value) == bits(value)


def test_nothing_is_copied() -> None:
    value = torch.arange(10.0)
    frames = encode(m.Push(0, 0, 0, "w", (10,), 0, value))
    value[3] = 42.0
    assert decode([frames[0], frames[1]]).value.data_ptr() == value.data_ptr()


def test_a_tensor_at_an_odd_address_is_moved() -> None:
    header, payload = encode(m.Push(0, 0, 0, "w", (4,), 0, torch.arange(4.0)))
    room = bytearray(64)
    for offset in range(8):
        view = memoryview(room)[offset : offset + 16]
        view[:] = payload
        value = decode([header, view]).value
        assert value.tolist() == [0, 1, 2, 3]
        assert value.data_ptr() % 4 == 0


@given(st.lists(st.binary().map(bytearray), max_size=3))
def test_random_bytes_are_refused(frames: list[bytearray]) -> None:
    with pytest.raises(KVStoreError, match="none of distkit's"):
        decode(frames)


@given(MESSAGES, st.data())
def test_damaged_messages_are_refused_or_well_formed(message: m.Message, data) -> None:
    frames = [bytearray(frame) for frame in encode(message)]
    damaged = data.draw(st.sampled_from([f for f in frames if f]))
    at = data.draw(st.integers(0, len(damaged) - 1))
    if data.draw(st.booleans()):
        damaged[at] = data.draw(st.integers(0, 255))
    else:
        del damaged[at:]
    try:
        assert isinstance(decode(frames), m.Message)
    except KVStoreError as e:
        assert "none of distkit's" in str(e)


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b"[" * 100_000],
        [b'["Pull",[0,0,0,"w"]]', b"more"],
        [b'["Pull",[0,0,0,true]]'],
        [b'["Pull",[0,0,"w"]]'],
        [b'["Pickle",[0,0,0]]'],
        [b'["Push",[0,0,0,"w",[1],0,"float32"]]'],
        [b'["Push",[0,0,0,"w",[1],0,"float32"]]', b"abc"],
        [b'["Push",[0,0,0,"w",[1],0,"save"]]', b"abcd"],
        [b'["Push",[0,0,0,"w",[1],0,null]]'],
        [b'["Pull",[0,0,0,"' + b"w" * (1 << 20) + b'"]]'],
    ],
    ids=lambda frames: repr(frames[:1])[:40],
)
def test_these_are_refused(frames: list[bytes]) -> None:
    with pytest.raises(KVStoreError, match="none of distkit's"):
        decode([bytearray(f) for f in frames])
