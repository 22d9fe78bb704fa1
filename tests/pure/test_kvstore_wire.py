"""Messages are unchanged on the wire."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import fields

from distkit.kvstore.protocol import messages as m
from distkit.kvstore.protocol.options import MODES, ON_CRASH, StoreOptions
from distkit.kvstore.protocol.placement import DTYPES
from distkit.kvstore.protocol.wire import LARGE, decode, encode

KEYS = st.integers(-(2**63), 2**63 - 1) | st.text()
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
OPTIONS = st.builds(
    StoreOptions, st.sampled_from(MODES), COUNTS, on_crash=st.sampled_from(ON_CRASH)
)
BY_TYPE: dict[str, st.SearchStrategy[Any]] = {
    "int": COUNTS,
    "bool": st.booleans(),
    "str": st.text(),
    "float": st.floats(allow_nan=False),
    "Key": KEYS,
    "tuple[int, ...]": SHAPES,
    "tuple[Key, ...]": st.lists(KEYS, max_size=3).map(tuple),
    "tuple[tuple[int, ...], str] | None": st.none() | st.tuples(SHAPES, st.text()),
    "Tensor": TENSORS,
    "Tensor | None": TENSORS | st.none(),
    "dict[int, str]": st.dictionaries(COUNTS, st.text(), max_size=4),
    "dict[str, Any]": st.dictionaries(
        st.text(),
        st.none()
        | st.booleans()
        | COUNTS
        | st.floats(allow_nan=False)
        | st.text()
        | st.lists(st.tuples(KEYS, st.floats(allow_nan=False)).map(list), max_size=3),
        max_size=4,
    ),
    "StoreOptions": OPTIONS,
    "StoreOptions | None": OPTIONS | st.none(),
}
KINDS = [
    m.Register,
    m.Barrier,
    m.AddressBook,
    m.Init,
    m.Push,
    m.Pull,
    m.AtBarrier,
    m.SetOptimizer,
    m.Assign,
    m.Departed,
    m.Reply,
    m.Error,
]


def declared(kind: type) -> list[str]:
    """Return the annotations of a message's fields in order."""
    return [a for cls in kind.__mro__[::-1] for a in vars(cls).get("__annotations__", {}).values()]


BUILT = {kind: st.builds(kind, *(BY_TYPE[f] for f in declared(kind))) for kind in KINDS}
COPIED = [BUILT[kind] for kind in (m.Push, m.AtBarrier, m.Assign, m.Departed, m.Init)]
COPIES = st.builds(m.Copy, COUNTS, COUNTS, st.one_of(COPIED))
MESSAGES = st.one_of(*BUILT.values(), COPIES)


def bits(value: object) -> object:
    """Convert a tensor to its bytes, and a message to its fields."""
    if isinstance(value, m.Message):
        return type(value), [bits(getattr(value, f.name)) for f in fields(value)]
    if not isinstance(value, torch.Tensor):
        return value
    return value.dtype, value.shape, value.view(torch.uint8).tolist()


def sent_and_decoded(*messages: m.Message) -> list[m.Message]:
    header, body = encode(*messages)
    return decode(memoryview(bytearray(header)), b"".join(body)).messages


@given(st.lists(MESSAGES, max_size=4))
def test_messages_round_trip(sent: list[m.Message]) -> None:
    for other, message in zip(sent_and_decoded(*sent), sent, strict=True):
        assert type(other) is type(message)
        for f in fields(message):
            assert bits(getattr(other, f.name)) == bits(getattr(message, f.name))
            assert type(getattr(other, f.name)) is type(getattr(message, f.name))


def large(n: int = LARGE) -> m.Push:
    return m.Push(0, 0, "w", (n,), 0, torch.arange(float(n)))


def test_large_tensors_are_not_copied() -> None:
    push = large()
    header, (body,) = encode(push)
    push.value[3] = 42.0
    assert decode(header, body).messages[0].value.data_ptr() == push.value.data_ptr()


def test_several_large_tensors_share_one_body() -> None:
    header, body = encode(large(), large(LARGE + 5))
    values = [message.value for message in decode(header, b"".join(body)).messages]
    assert [v.tolist() for v in values] == [list(range(n)) for n in (LARGE, LARGE + 5)]


def test_unaligned_tensor_is_copied_to_an_aligned_address() -> None:
    header, (body,) = encode(large())
    buffer = bytearray(len(body) + 8)
    for offset in range(8):
        view = memoryview(buffer)[offset : offset + len(body)]
        view[:] = body
        value = decode(header, view).messages[0].value
        assert value[:3].tolist() == [0, 1, 2]
        assert value.data_ptr() % 4 == 0
