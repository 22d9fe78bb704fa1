"""Tensors before and after: the projection, the static picture, the table."""

import json
import math
import xml.etree.ElementTree as ET

import traces
from hypothesis import given, settings
from hypothesis import strategies as st
from traces import MS, Script, summary

from distkit.events import Event, Op, State, Summary
from distkit.trace.trace import Trace
from distkit.views.scene.renderer import to_svg
from distkit.views.scenes import Tensors
from distkit.views.tensors import MAX_RANKS, draw

FOUR = dict(nbytes=16, shape=(2, 2), dtype="float32")


def all_reduce_trace(inputs, results, op=Op.ALL_REDUCE) -> Trace:
    s = Script()
    for rank, (before, after) in enumerate(zip(inputs, results, strict=True)):
        s.op(
            rank,
            op,
            0,
            MS,
            **FOUR,
            where="sgd.py:3",
            before=before and summary(before),
            after=after and summary(after),
        )
    return s.trace(world_size=len(inputs))


def only_keyframe(trace: Trace):
    """Return the keyframe of the only operation."""
    (keyframe,) = draw(trace)["keyframes"]
    return keyframe


def texts(trace: Trace) -> list[str]:
    """Return the verdicts of the only operation."""
    return [verdict["text"] for verdict in only_keyframe(trace)["verdicts"]]


def shapes(trace: Trace, tag: str) -> list[str]:
    """Return the text of the shapes with a tag."""
    return [shape[4] for shape in draw(trace)["scene"]["shapes"] if shape[0] == tag]


def test_all_reduce_shows_inputs_and_equal_results() -> None:
    trace = all_reduce_trace([[1, 2, 3, 4], [10, 2, 3, 4]], [[11, 4, 6, 8]] * 2)
    op = only_keyframe(trace)
    assert (op["caption"], op["details"]) == ("all_reduce", "float32 [2, 2] · at 2 µs")
    assert op["where"] == "sgd.py:3"
    assert texts(trace) == [
        "before: rank 1 differs from the others, by up to 9",
        "after: the same on all 2 ranks",
    ]
    assert any(text.endswith("\n1, 2\n3, 4") for text in shapes(trace, "title"))
    assert "±11" in shapes(trace, "text")  # the ends of the color scale


def test_differing_rank_is_named_with_cells_and_amount() -> None:
    trace = all_reduce_trace(
        [[0, 0, 0, 0]] * 4, [[1, 1, 1, 1]] * 2 + [[1, 1, 1, 1.5], [1, 1, 1, 1]]
    )
    assert texts(trace)[1] == "after: rank 2 differs from the others, by up to 0.5"
    assert only_keyframe(trace)["verdicts"][1]["expected"]
    styles = [shape[1] for shape in draw(trace)["scene"]["shapes"]]
    assert styles.count("alarm") == 1 and styles.count("fresh") == 1


def test_nan_equals_nan_and_is_counted_in_words() -> None:
    nan = [math.nan, 1, math.inf, -math.inf]
    trace = all_reduce_trace([nan, nan], [nan, nan])
    assert [verdict["word"] for verdict in only_keyframe(trace)["verdicts"]] == ["same", "same"]
    assert "1 × NaN, 1 × ∞, 1 × −∞" in repr(Tensors(trace))


def test_message_compares_sent_and_received_values() -> None:
    trace = traces.ping_pong()
    for op in draw(trace)["keyframes"]:
        (verdict,) = op["verdicts"]
        assert verdict["text"].endswith("sent") and verdict["word"] == "same"
    assert {"sends to rank 1", "receives from rank 0"} <= {*shapes(trace, "text")}


def test_operations_are_drawn_after_those_that_their_ranks_had_finished() -> None:
    s, two = Script(), summary([1, 2])
    kind = dict(nbytes=8, shape=(2,), dtype="float32", before=two, after=two)
    s.op(0, Op.BROADCAST, 5 * MS, 6 * MS, peer=1, **kind)  # rank 0 enters late
    s.op(1, Op.BROADCAST, 0, MS, peer=1, **kind)
    s.op(1, Op.SEND, 2 * MS, 3 * MS, peer=0, **kind)
    s.op(0, Op.RECV, 7 * MS, 8 * MS, peer=1, **kind)
    captions = [keyframe["caption"] for keyframe in draw(s.trace(world_size=2))["keyframes"]]
    assert captions == ["broadcast", "rank 1 → rank 0"]


def test_thousand_ranks_are_compared_and_sixteen_drawn() -> None:
    values = [[1.0, 1, 1, 1]] * 999 + [[2.0, 1, 1, 1]]
    trace = all_reduce_trace(values, values)
    picture = draw(trace)
    assert texts(trace)[1] == "after: rank 999 differs from the others, by up to 1"
    assert len(picture["list"]["rows"][0][1]) == MAX_RANKS
    svg = to_svg(picture)
    assert len(svg.encode()) < 60_000 and "and 984 more ranks" in svg


def test_operation_without_values_on_a_drawn_rank_is_not_shown() -> None:
    values = [*[None] * MAX_RANKS, [1.0, 1, 1, 1]]
    picture = draw(all_reduce_trace(values, values))
    assert picture["keyframes"] == []
    assert picture["notices"][0].startswith("1 operation not shown")


numbers = st.floats(width=32)
tensor = st.builds(
    lambda v, more, low, high: Summary(tuple(v), math.nan, low, high, len(v) + more, more > 5),
    st.lists(numbers, max_size=64),
    st.integers(0, 9),
    numbers,
    numbers,
)
events = st.builds(
    Event,
    rank=st.integers(0, 3),
    seq=st.integers(0, 5),
    op=st.sampled_from(Op),
    state=st.sampled_from(State),
    time=st.floats(0, 1),
    peer=st.none() | st.integers(0, 3),
    shape=st.lists(st.integers(0, 5), max_size=3).map(tuple),
    dtype=st.just("float32"),
    attributes=st.text(max_size=5).map(lambda s: {"label": s}),
    summary=st.none() | tensor,
)


@settings(max_examples=60)
@given(st.lists(events, max_size=30))
def test_any_trace_can_be_drawn(recorded: list[Event]) -> None:
    picture = draw(Trace(recorded))
    json.dumps(picture, allow_nan=False)
    svg = to_svg(picture)
    ET.fromstring(svg)
    assert len(svg.encode()) <= 60_000
