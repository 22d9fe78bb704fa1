"""Chrome trace JSON follows the rules of the Trace Event Format and of Perfetto's importer.

The rules: the Trace Event Format document; perfetto's docs/getting-started/other-formats.md
(slices of a thread must nest); its json_trace_parser_impl.cc (a flow is identified by id, cat
and name; "f" binds to the slice around it with bp "e"; processes and threads are numbers).
"""

import gzip
import json
import math
from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from traces import DEMOS, MS, Script, big, odd_values, ring, sync_sgd

from distkit.events import Op, State
from distkit.trace.chrome import chrome
from distkit.trace.trace import Trace

TRACES = {**DEMOS, "odd": odd_values, "big": lambda: big(800), "empty": Trace}
EPSILON = 1e-6  # a thousandth of a nanosecond


def end(event):
    return float("inf") if event["ph"] == "B" else event["ts"] + event["dur"]


def slices(events):
    return [e for e in events if e["ph"] in "XB"]


def enclosing(events, flow):
    """Return the slice that viewers bind a flow event to: the innermost one on its thread."""
    around = [
        e
        for e in slices(events)
        if (e["pid"], e["tid"]) == (flow["pid"], flow["tid"])
        and e["ts"] - EPSILON <= flow["ts"] <= end(e) + EPSILON
    ]
    return max(around, key=lambda e: (e["ts"], -end(e)), default=None)


WHERE = {"pid": int, "tid": int}
SLICE = {"name": str, "cat": str, "ts": float, "args": dict, **WHERE}
FLOW = {"name": str, "cat": str, "ts": float, "id": int, **WHERE}
#: The exact fields of an event, by phase: names and types.
FIELDS = {
    "X": {**SLICE, "dur": float},
    "B": SLICE,
    "M": {"name": str, "args": dict, **WHERE},
    "s": FLOW,
    "t": FLOW,
    "f": {**FLOW, "bp": str},
}
#: The metadata events, and the name and type of each one's argument.
METADATA = {
    "process_name": ("name", str),
    "process_sort_index": ("sort_index", int),
    "thread_name": ("name", str),
    "thread_sort_index": ("sort_index", int),
}


def has_type(value, kind):
    """Return whether a value has a JSON type; an int is a number, a bool is not."""
    kinds = (int, float) if kind is float else kind
    return isinstance(value, kinds) and not isinstance(value, bool)


def check_fields(events):
    """Check that each event has the fields of its phase, with correct types and finite numbers."""
    for e in events:
        fields = {"ph": str, **FIELDS[e["ph"]]}
        assert set(e) == set(fields), e
        assert all(has_type(e[name], kind) for name, kind in fields.items()), e
        assert all(math.isfinite(e[name]) for name in ("ts", "dur") if name in e)
        assert 0 < e["pid"] < 2**32 and 0 < e["tid"] < 2**32 and e["name"]
        if e["ph"] == "M":
            key, kind = METADATA[e["name"]]
            assert set(e["args"]) == {key} and has_type(e["args"][key], kind)


def check_format(events):
    """Check every rule of the format."""
    check_fields(events)
    known = [e for e in events if e["ph"] == "M"]
    assert events[: len(known)] == known  # names first
    assert len({(e["name"], e["pid"], e["tid"]) for e in known}) == len(known)
    names = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert len({tid for _, tid in names}) == len(names)  # unique across processes
    timed = [e for e in events if e["ph"] != "M"]
    assert [e["ts"] for e in timed] == sorted(e["ts"] for e in timed)
    assert all(e["ts"] >= 0 and e.get("dur", 0) >= 0 for e in timed)
    assert {(e["pid"], e["tid"]) for e in timed} <= names


def check_nesting(events):
    """Check that slices of a thread nest or follow each other; importers drop other slices."""
    threads = defaultdict(list)
    for e in slices(events):
        stack = threads[e["tid"]]
        while stack and end(stack[-1]) <= e["ts"] + EPSILON:
            stack.pop()
        assert not stack or end(e) <= end(stack[-1]) + EPSILON
        stack.append(e)


def check_flows(events):
    """Check that each flow starts once, before it ends, within the slices that it connects."""
    arrows = defaultdict(list)
    for e in events:
        if e["ph"] in "stf":
            arrows[e["id"], e["cat"], e["name"]].append(e)
            assert enclosing(events, e) is not None
    for parts in arrows.values():
        kinds = [e["ph"] for e in parts]
        assert kinds[0] == "s" and kinds[-1] == "f" and set(kinds[1:-1]) <= {"t"}
        assert parts[-1]["bp"] == "e"
    assert len({id for id, *_ in arrows}) == len(arrows)  # an id belongs to one flow
    return arrows


@pytest.mark.parametrize("name", TRACES)
def test_files_follow_the_format(tmp_path, name):
    trace = TRACES[name]()
    plain = trace.to_chrome(tmp_path / "t.json").read_bytes()
    document = json.loads(plain, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert gzip.decompress(trace.to_chrome(tmp_path / "t.json.gz").read_bytes()) == plain
    assert document["displayTimeUnit"] in ("ms", "ns") and isinstance(document["otherData"], dict)
    events = document["traceEvents"]
    check_format(events)
    check_nesting(events)
    check_flows(events)
    assert len([e for e in slices(events) if e["name"] != "arrived"]) == len(trace.spans)


def test_flow_runs_from_send_to_the_end_of_its_receive():
    trace = ring(4)
    events = chrome(trace)["traceEvents"]
    arrows = check_flows(events)
    assert len(arrows) == len(trace.messages) == 24
    for start, stop in arrows.values():
        assert enclosing(events, start)["name"] == "send"
        assert enclosing(events, stop)["name"] == "arrived"
        assert stop["pid"] == start["pid"] % 4 + 1  # to the right neighbor
        assert enclosing(events, start)["ts"] < enclosing(events, stop)["ts"]  # not reversed


def test_flow_connects_all_members_of_a_collective():
    arrows = check_flows(chrome(sync_sgd(4, steps=2))["traceEvents"])
    assert len(arrows) == 5  # a broadcast, two buckets in each of two steps
    for parts in arrows.values():
        assert sorted(e["pid"] for e in parts) == [1, 2, 3, 4]


def test_unfinished_operation_has_no_end_event():
    events = chrome(DEMOS["hang"]())["traceEvents"]
    open_ones = [e for e in events if e["ph"] == "B"]
    assert sorted(e["name"] for e in open_ones) == ["all_reduce"] * 3 + ["recv"]
    assert not [e for e in events if e["ph"] == "E"]
    assert {e["args"]["state"] for e in open_ones} == {str(State.STARTED)}


ops = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.sampled_from([Op.SEND, Op.RECV, Op.ALL_REDUCE, Op.BROADCAST, Op.MARK]),
        st.integers(0, 50),
        st.none() | st.integers(0, 50),
        st.integers(0, 2),
    ),
    max_size=25,
)


@settings(deadline=None)
@given(ops)
def test_any_operations_follow_the_format(operations):
    script = Script()
    for rank, op, begin, length, peer in operations:
        finish = None if length is None else (begin + length) * MS
        script.op(rank, op, begin * MS, finish, peer=peer if op in (Op.SEND, Op.RECV) else None)
    events = chrome(script.trace())["traceEvents"]
    check_format(events)
    check_nesting(events)
    check_flows(events)
