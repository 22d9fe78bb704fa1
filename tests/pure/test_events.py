"""Events, traces and their files."""

from __future__ import annotations

import gzip
import json
import pickle
import tempfile
from pathlib import Path

import pytest
import traces
from hypothesis import given
from hypothesis import strategies as st

import distkit as dk
from distkit.events import Event, Op, State, Summary
from distkit.trace.trace import Trace

floats = st.floats(allow_nan=True, allow_infinity=True)
summaries = st.builds(
    Summary,
    st.lists(floats, max_size=4).map(tuple),
    floats,
    floats,
    floats,
    st.integers(0, 10**9),
    st.booleans(),
)
events = st.builds(
    Event,
    rank=st.integers(0, 9),
    seq=st.integers(0, 99),
    op=st.sampled_from(Op),
    state=st.sampled_from(State),
    time=st.floats(0, 1e6),
    peer=st.none() | st.integers(0, 9),
    group=st.sampled_from(["world", "1"]),
    nbytes=st.integers(0, 2**40),
    shape=st.lists(st.integers(0, 99), max_size=3).map(tuple),
    dtype=st.sampled_from(["", "int8"]),
    tag=st.none() | st.integers(0, 9),
    where=st.text(max_size=9),
    attributes=st.text(max_size=9).map(lambda s: {"label": s, "stale_by": (1, 2)}),
    match=st.none() | st.text(max_size=4),
    summary=st.none() | summaries,
)


def message(src: int, dst: int, at: float, seq: int, tag: int = 0) -> list[Event]:
    """Return a completed send and its receive."""
    return [
        Event(src, seq, Op.SEND, State.STARTED, at, peer=dst, nbytes=8, tag=tag),
        Event(src, seq, Op.SEND, State.COMPLETED, at + 0.1, peer=dst, nbytes=8, tag=tag),
        Event(dst, seq, Op.RECV, State.STARTED, at, peer=src, nbytes=8, tag=tag),
        Event(dst, seq, Op.RECV, State.COMPLETED, at + 0.2, peer=src, nbytes=8, tag=tag),
    ]


@given(st.lists(events, max_size=20))
def test_save_and_load_round_trip(recorded: list[Event]) -> None:
    trace = Trace(recorded, traces.info(name="é", ranks={"0": {"name": "rank 0"}}))
    with tempfile.TemporaryDirectory() as folder:
        loaded = Trace.load(trace.save(Path(folder, "trace.gz")))
    assert repr(loaded.events) == repr(trace.events)  # repr: NaN is not equal to itself
    assert loaded.info == trace.info


@given(st.lists(events, max_size=20))
def test_any_events_can_be_queried(recorded: list[Event]) -> None:
    trace = Trace(recorded)
    assert sum(map(len, trace.by_rank.values())) == len(trace) == len(trace.events)
    assert {(s.rank, s.seq) for s in trace.spans} == {(e.rank, e.seq) for e in recorded}
    assert len(trace.to_dataframe()) == len(trace)
    assert str(len(trace)) in repr(trace)
    for m in trace.messages:
        assert m.send is not None or m.recv is not None


def test_request_and_reply_are_two_messages() -> None:
    trace = Trace(
        [
            Event(0, 0, Op.PULL, State.STARTED, 0.0, peer=2, attributes={"key": "w"}, match="m"),
            Event(2, 0, Op.RECV, State.COMPLETED, 0.1, peer=0, match="m"),
            Event(2, 1, Op.SEND, State.STARTED, 0.2, peer=0, match="m", nbytes=64),
            Event(0, 0, Op.PULL, State.COMPLETED, 0.3, peer=2, attributes={"key": "w"}, match="m"),
        ]
    )
    assert [(m.src, m.dst, m.sent, m.received, m.nbytes) for m in trace.messages] == [
        (0, 2, 0.0, 0.1, 0),
        (2, 0, 0.2, 0.3, 64),
    ]


def test_dataframe_has_a_column_for_each_field() -> None:
    frame = Trace(message(0, 1, 5.0, 0)).to_dataframe()
    expected = {
        "rank",
        "seq",
        "op",
        "state",
        "time",
        "peer",
        "group",
        "nbytes",
        "shape",
        "dtype",
        "tag",
        "where",
        "match",
    }
    assert expected <= set(frame.columns)
    assert frame.time.min() == 0.0
    assert set(frame.op) == {"send", "recv"}


# -- files that cannot be read ---------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return Trace(message(0, 1, 0.0, 0)).save(tmp_path / "trace.gz")


def rewrite(path: Path, change: object) -> Path:
    lines = gzip.decompress(path.read_bytes()).decode().splitlines()
    path.write_bytes(gzip.compress("\n".join(change(lines)).encode()))  # type: ignore[operator]
    return path


def test_older_version_raises_with_a_remedy(saved: Path) -> None:
    def older(lines: list[str]) -> list[str]:
        return [json.dumps({**json.loads(lines[0]), "version": 2}), *lines[1:]]

    with pytest.raises(
        dk.errors.TraceFileError, match=r"in format version 2, .* Record the run again"
    ):
        Trace.load(rewrite(saved, older))


def test_unknown_fields_of_a_saved_trace_are_ignored(saved: Path) -> None:
    def newer(lines: list[str]) -> list[str]:
        head = json.loads(lines[0])
        return [json.dumps({**head, "more": 1, "meta": {**head["meta"], "draws": 3}}), *lines[1:]]

    assert Trace.load(rewrite(saved, newer)) == Trace.load(saved)


@given(st.lists(events, max_size=20))
def test_table_round_trips_events(recorded: list[Event]) -> None:
    trace = Trace(recorded)
    loaded = Trace.from_table(trace.table, trace.info)
    assert repr(tuple(loaded)) == repr(trace.events)
    assert len(loaded) == len(trace) and repr(loaded.spans) == repr(trace.spans)
    if all(e.summary is None for e in recorded):  # NaN is not equal to itself
        assert loaded == trace and trace == loaded


@pytest.mark.parametrize(
    ("op", "label", "attributes"),
    [
        (Op.STORE_WAIT, "get ready", {"method": "get", "keys": ("ready",)}),
        (Op.STORE_SET, "multi_set a, b", {"method": "multi_set", "keys": ("a", "b")}),
        (
            Op.REGISTER,
            "dist_sync backup=1 on_crash=continue",
            {"mode": "dist_sync", "backup": 1, "on_crash": "continue"},
        ),
        (Op.PUSH, "w", {"key": "w", "clock": 3}),
        (Op.PULL, "'7'", {"key": "7"}),
        (Op.PUSH, "w, 3, …, '7'", {"keys": ("w", 3, "…", "7")}),
        (Op.SEND, "w: refused", {"key": "w", "refused": True}),
        (Op.SEND, "w", {"key": "w", "dropped": 2}),
        (Op.TOUCH, "add", {"function": "add"}),
        (Op.MARK, "step", {"label": "step"}),
        (Op.MARK, "update  → v1", {"key": "", "version": 1, "workers": (), "stale_by": ()}),
        (
            Op.MARK,
            "update a → v2 → v3 ← 0 (stale by 1), 12 (stale by 30)",
            {"key": "a → v2", "version": 3, "workers": (0, 12), "stale_by": (1, 30)},
        ),
    ],
)
def test_label_shows_the_attributes(op: Op, label: str, attributes: dict) -> None:
    assert Event(0, 0, op, State.STARTED, 0.0, attributes=attributes).label == label


def test_attributes_are_immutable() -> None:
    event = Event(0, 0, Op.PUSH, State.STARTED, 0.0, attributes={"key": "w"})
    loaded = pickle.loads(pickle.dumps(event))
    assert loaded == event and hash(loaded) == hash(event) and loaded.attributes == {"key": "w"}
    for change in (lambda a: a.update(key="b"), lambda a: a.pop("key"), lambda a: a.clear()):
        with pytest.raises(TypeError, match=r"dataclasses\.replace"):
            change(event.attributes)
