"""Files from other programs: flight-recorder dumps and Chrome traces, read without running code."""

from __future__ import annotations

import gzip
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from traces import ring

import distkit as dk
from distkit.errors import TraceFileError
from distkit.events import Op, State
from distkit.trace import file as trace_file
from distkit.trace.trace import Trace

NS = 1_790_000_000_000_000_000
Json = dict[str, Any]


def entry(number: int, name: str, state: str = "completed", **fields: Any) -> Json:
    """Return a call as written by the flight recorder."""
    user_frame = {
        "name": "step",
        "filename": f"/home/me/{fields.pop('file', 'train.py')}",
        "line": number,
    }
    torch_frame = {"name": name, "filename": "/usr/lib/site-packages/torch/c10d.py", "line": 1}
    started, completed = state in ("started", "completed"), state == "completed"
    return {
        "record_id": number,
        "pg_id": 0,
        "process_group": ["0", "default_pg"],
        "collective_seq_id": number + 1,
        "p2p_seq_id": 0,
        "op_id": number + 1,
        "profiling_name": f"nccl:{name}",
        "time_created_ns": NS + number * 1000,
        "input_sizes": [[4, 2]],
        "input_dtypes": ["BFloat16"],
        "output_sizes": [[4, 2]],
        "output_dtypes": ["BFloat16"],
        "state": state,
        "time_discovered_started_ns": NS + number * 1000 + 100 if started else None,
        "time_discovered_completed_ns": NS + number * 1000 + 300 if completed else None,
        "retired": completed,
        "timeout_ms": 600_000,
        "is_p2p": "->" in name or "<-" in name,
        "frames": [torch_frame, user_frame],
        **fields,
    }


def dump(*entries: Json, ranks: str = "[0, 1]") -> Json:
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": ranks}}
    return {"version": "2.10", "pg_config": config, "pg_status": {}, "entries": list(entries)}


def load(folder: Path, *dumps: Json) -> Trace:
    for rank, content in enumerate(dumps):
        folder.joinpath(f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(content))
    return Trace.load(folder)


def kinds_and_culprits(trace: Trace) -> list[tuple[str, tuple[int, ...]]]:
    return [(f.kind, f.culprits) for f in trace.diagnose()]


# -- dumps -------------------------------------------------------------------------


def test_dump_loads_as_trace(tmp_path: Path) -> None:
    trace = load(tmp_path, dump(entry(0, "all_reduce")), dump(entry(0, "all_reduce")))
    first = trace.spans[0]
    assert (first.op, first.shape, first.dtype, first.nbytes) == (
        *(Op.ALL_REDUCE, (4, 2), "bfloat16", 16),
    )
    assert (first.where, first.state) == ("train.py:0", State.COMPLETED)
    assert first.seconds == pytest.approx(200e-9)
    assert trace.ranks == [0, 1] and len(trace.collectives) == 1
    assert trace.diagnose() == []
    assert trace.save(tmp_path / "kept.gz") and Trace.load(tmp_path / "kept.gz").events


@pytest.mark.parametrize("write", [json.dumps, lambda d: gzip.compress(json.dumps(d).encode())])
def test_json_and_gzip_dumps_are_loaded(tmp_path: Path, write: Callable[[Json], Any]) -> None:
    files = [tmp_path / f"fr_{rank}.json" for rank in range(2)]
    for file in files:
        content = write(dump(entry(0, "all_reduce")))
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert len(Trace.load(files).collectives) == 1
    assert Trace.load(str(files[1])).spans[0].rank == 1


def test_rank_without_a_dump_is_reported(tmp_path: Path) -> None:
    waiting = dump(entry(0, "all_reduce", "started"), ranks="[0, 1, 2]")
    trace = load(tmp_path, waiting, waiting)
    assert kinds_and_culprits(trace) == [("skipped", (2,))]
    assert "(its dump is missing)" in trace.diagnose()[0].message


def test_send_and_receive_are_matched(tmp_path: Path) -> None:
    trace = load(tmp_path, dump(entry(0, "send 0->1")), dump(entry(0, "recv 1<-0")))
    (message,) = trace.messages
    assert (message.src, message.dst, message.nbytes) == (0, 1, 16)
    assert message.received is not None


def test_peers_are_group_ranks(tmp_path: Path) -> None:
    content = dump(entry(0, "send 0->1", process_group=["7", "pp"]), ranks="[0, 1, 2, 3]")
    content["pg_config"]["7"] = {"name": "7", "desc": "pp", "ranks": "[1, 3]"}
    file = tmp_path / "dump_1"
    file.write_text(json.dumps(content))
    trace = Trace.load(file)
    assert [(s.rank, s.peer, s.group) for s in trace.spans] == [(1, 3, "7")]
    assert trace.info.groups == {"world": [0, 1, 2, 3], "7": [1, 3]}


def test_wrapped_ring_buffers_are_aligned(tmp_path: Path) -> None:
    """Rank 1 has lost its first calls, so those of rank 0 have no match."""
    long = dump(*(entry(n, "all_reduce") for n in range(4)), entry(4, "barrier", "started"))
    trace = load(tmp_path, long, dump(entry(2, "all_reduce"), entry(3, "all_reduce")))
    assert [len(calls) for calls in trace.collectives] == [2, 2, 1]
    assert kinds_and_culprits(trace) == [("missing_barrier", (1,))]


def test_queued_call_has_not_started(tmp_path: Path) -> None:
    """Two groups in different orders: each rank waits in its first call; its second is queued."""
    a, b = {"process_group": ["1", "a"]}, {"process_group": ["2", "b"]}
    config = {
        name: {"name": name, "desc": desc, "ranks": "[0, 1]"}
        for name, desc in (("1", "a"), ("2", "b"))
    }
    dumps = [
        dump(entry(0, "all_reduce", "started", **x), entry(1, "all_reduce", "scheduled", **y))
        for x, y in ((a, b), (b, a))
    ]
    for content in dumps:
        content["pg_config"] |= config
    trace = load(tmp_path, *dumps)
    assert {c for _, culprits in kinds_and_culprits(trace) for c in culprits} == {0, 1}
    assert trace.info.unrecorded[0] == {"all_reduce queued behind an unfinished call": 1}


def test_unmatchable_messages_are_counted(tmp_path: Path) -> None:
    """Rank 1 has lost the calls before its receive, so no send can be matched with certainty."""
    sender = dump(*(entry(n, "send 0->1") for n in range(2)), entry(2, "send 0->1", "started"))
    trace = load(tmp_path, sender, dump(entry(4, "recv 1<-0"), entry(5, "all_reduce")))
    assert [(s.rank, s.seq) for s in trace.spans] == [(0, 2), (1, 5)]
    reason = "whose partner may have been overwritten"
    assert trace.info.unrecorded == {0: {f"send {reason}": 2}, 1: {f"recv {reason}": 1}}


# -- invalid files -----------------------------------------------------------------------


def broken(change: Callable[[Json], Any]) -> Json:
    content = dump(entry(0, "all_reduce"))
    change(content)
    return content


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "damaged, or not a trace"),
        (b"{", "Expecting property name"),
        (b"\x80\x04garbage", "damaged, or not a trace"),
        (b"\x1f\x8b\x08garbage", "truncated or corrupt"),
        (b'{"traceEvents": [1, 2]}', "`$.traceEvents[0]`"),
        (b'{"hello": 1}', "not a trace: it contains hello. distkit reads its own"),
        (b'"text"', "not a trace: it contains text. "),
        (pickle.dumps(dump(entry(0, "all_reduce")))[:-90], "damaged, or not a trace"),
        (pickle.dumps(os.system), "system, which is not a plain value"),
        (pickle.dumps({"version": 1, "entries": {1, 2}}), "Expected `object`, got `int`"),
        (broken(lambda d: d.update(entries=7)), "Expected `array`, got `int` - at `$.entries`"),
        (broken(lambda d: d["entries"][0].pop("state")), "missing required field `state`"),
        (broken(lambda d: d["entries"][0].update(input_sizes=[["x"]])), "input_sizes[0][0]"),
        (broken(lambda d: d["entries"][0].update(time_created_ns="x")), "time_created_ns"),
        (broken(lambda d: d["entries"][0].update(frames=[{"line": "x"}])), "frames[0].line"),
        (broken(lambda d: d["pg_config"]["0"].update(ranks="[0")), "rank_0: damaged"),
    ],
)
def test_damaged_file_error_names_file_and_fault(
    tmp_path: Path, content: bytes | Json, expected: str
) -> None:
    file = tmp_path / "rank_0"
    file.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    with pytest.raises(TraceFileError) as error:
        Trace.load(file)
    assert str(error.value).startswith(str(file)) and expected in str(error.value)


class Explosive:
    def __reduce__(self) -> Any:
        return os.mkdir, ("exploded",)


def test_pickle_executes_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "rank_0"
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        file.write_bytes(pickle.dumps({"entries": [Explosive()], "version": "2"}, protocol))
        with pytest.raises(TraceFileError, match="not a plain value"):
            Trace.load(file)
    assert not tmp_path.joinpath("exploded").exists()


DUMP = pickle.dumps(dump(entry(0, "all_reduce"), entry(1, "send 0->1", "started")), 2)


@given(st.integers(1, len(DUMP) - 1), st.binary(min_size=1, max_size=3))
def test_damaged_dump_loads_or_raises(
    tmp_path_factory: pytest.TempPathFactory, at: int, noise: bytes
) -> None:
    file = tmp_path_factory.getbasetemp() / "damaged_0"
    file.write_bytes(DUMP[:at] + noise + DUMP[at + len(noise) :])
    try:
        Trace.load(file).diagnose()
    except TraceFileError as error:
        assert str(file) in str(error)


@pytest.mark.parametrize("write", [bytes, gzip.compress])
def test_unpacked_size_is_limited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[bytes], bytes]
) -> None:
    monkeypatch.setattr(trace_file, "MAX_BYTES", 1000)
    file = tmp_path / "rank_0"
    saved = ring().save(tmp_path / "own.gz")
    for content in (json.dumps(dump()).encode() + b" " * 900, gzip.decompress(saved.read_bytes())):
        file.write_bytes(write(content))
        with pytest.raises(
            TraceFileError, match="rank_0: the file is larger than 1,000 bytes when"
        ):
            Trace.load(file)


# -- the rank of a file ----------------------------------------------------------------------------


NAMES = [
    ("nccl_trace_rank_0", "nccl_trace_rank_1"),
    ("nccl_trace_rank_container-node07_0", "nccl_trace_rank_container-node12_1"),  # pytorch#140879
    ("nccl_trace_rank_node07.cluster.example_0", "nccl_trace_rank_node07.cluster.example_1"),
    ("comm_lib_trace_rank_0.json", "comm_lib_trace_rank_1.json.gz"),
    ("dump.rank=0.step=200.pkl", "dump.rank=1.step=200.pkl"),
]


@pytest.mark.parametrize("names", NAMES)
def test_rank_of_a_dump_is_parsed_from_its_name(tmp_path: Path, names: tuple[str, str]) -> None:
    files = [tmp_path / name for name in names]
    for rank, file in enumerate(files):
        file.write_bytes(pickle.dumps(dump(entry(0, "all_reduce", file=f"{rank}.py"))))
    trace = Trace.load(files[::-1])
    assert {e.rank: e.where for e in trace} == {0: "0.py:0", 1: "1.py:0"}
    assert [trace.info.ranks[r].file for r in range(2)] == [file.name for file in files]


@pytest.mark.parametrize(
    ("other", "error", "message"),
    [
        ("b_0", TraceFileError, "a_0 and b_0 both belong to rank 0"),
        ("plain", TraceFileError, "rank is unknown"),
        ("c_1.json", TraceFileError, r"a_0 and c_1.json are different types of files"),
        ("none_1", FileNotFoundError, "none_1"),
    ],
)
def test_inconsistent_files_raise(
    tmp_path: Path, other: str, error: type[Exception], message: str
) -> None:
    for name in ("a_0", "b_0", "plain"):
        tmp_path.joinpath(name).write_text(json.dumps(dump(entry(0, "all_reduce"))))
    tmp_path.joinpath("c_1.json").write_text(json.dumps(profile_events(1)))
    with pytest.raises(error, match=message):
        Trace.load([tmp_path / "a_0", tmp_path / other])


# -- Chrome traces -------------------------------------------------------------------


def test_perfetto_export_raises_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(TraceFileError, match=r"written by trace\.to_chrome .* trace\.save"):
        Trace.load(ring().to_chrome(tmp_path / "ring.json.gz"))


def profile_events(rank: int) -> Json:
    """Return torch.profiler's profile of one rank, with an all-reduce under NCCL."""
    details = {
        "External id": 12,
        "Collective name": "allreduce",
        "dtype": "Float",
        "In msg nelems": 8,
        "Process Group Name": "3",
        "Process Group Description": "dp",
    }
    op = {"External id": 11, "Input Dims": [[[8]]], "Input type": ["TensorList"]}
    rows = [
        ("cpu_op", "c10d::allreduce_", 7, 100, 50, op),
        ("cpu_op", "record_param_comms", 7, 110, 10, details),
        ("kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)", 20, 400, 300, {"External id": 12}),
        ("python_function", "/home/me/train.py(31): step", 7, 90, 900, {}),
        ("python_function", "torch/distributed/distributed_c10d.py(9): all_reduce", 7, 95, 90, {}),
        ("user_annotation", "ProfilerStep#1", 7, 50, 1000, {}),
    ]
    groups = [
        {"pg_name": "0", "pg_desc": "default_pg", "ranks": [0, 1]},
        {"pg_name": "3", "pg_desc": "dp", "ranks": [0, 1]},
    ]
    return {
        "schemaVersion": 1,
        "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": 2, "pg_config": groups},
        "baseTimeNanoseconds": 1_000_000_000 * (5 + rank),
        "traceEvents": [
            {"ph": "X", "cat": c, "name": n, "pid": 1, "tid": t, "ts": ts, "dur": dur, "args": args}
            for c, n, t, ts, dur, args in rows
        ],
    }


def indent(content: Json) -> str:
    """Format a profile as torch does: indented, with a leading space."""
    return " " + json.dumps(content, indent=2) + "\n"


def replace_text(content: Json, old: str, new: str) -> str:
    text = indent(content)
    assert old in text
    return text.replace(old, new)


FORMS: dict[str, Callable[[Json], str | bytes]] = {
    "compact": json.dumps,
    "with a leading space": indent,
    "with a leading newline": lambda c: "\n" + json.dumps(c, indent=2),
    "gzipped": lambda c: gzip.compress(indent(c).encode()),
    "with a byte order mark": lambda c: indent(c).encode("utf-8-sig"),
    "with Windows line endings": lambda c: indent(c).replace("\n", "\r\n"),
    "with a tab in a name": lambda c: replace_text(c, "(31): step", "(31):\tstep"),
    "with a name that is not UTF-8": lambda c: indent(c).encode().replace(b"#1", b"#\xff"),
    "with quotes in a name": lambda c: replace_text(
        c, "/home/me/train.py(31): step", '{"a": 1}(2): x'
    ),
    "with NaN": lambda c: replace_text(c, '"External id": 11', '"External id": NaN'),
    "with the trace's name first": lambda c: "{" + '"traceName": "x",' + indent(c).strip()[1:],
}


@pytest.mark.parametrize("form", FORMS)
def test_profile_loads_in_any_format(tmp_path: Path, form: str) -> None:
    file = tmp_path / "vm_77.1790857026000000000.pt.trace.json.gz"
    content = FORMS[form](profile_events(0))
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    (call,) = (s for s in Trace.load(file).spans if s.op is not Op.MARK)
    assert (call.rank, call.op, call.dtype, call.nbytes) == (0, Op.ALL_REDUCE, "float32", 32)


def test_nccl_profile_has_groups_and_kernels(tmp_path: Path) -> None:
    for rank in range(2):
        tmp_path.joinpath(f"worker{rank}.pt.trace.json").write_text(
            json.dumps(profile_events(rank))
        )
    trace = Trace.load(tmp_path)
    calls = [s for s in trace.spans if s.op is Op.ALL_REDUCE]
    assert [(s.rank, s.group, s.shape, s.dtype, s.nbytes) for s in calls] == [
        (r, "3", (8,), "float32", 32) for r in range(2)
    ]
    assert [s.seconds for s in calls] == pytest.approx([300e-6] * 2)  # the duration of the kernel
    assert calls[1].start - calls[0].start == pytest.approx(1)  # each file has its own clock
    assert len(trace.collectives) == 1
    assert {s.label for s in trace.spans if s.op is Op.MARK} == {"ProfilerStep#1"}


def load_profiles(folder: Path, *contents: Json) -> Trace:
    for rank, content in enumerate(contents):
        folder.joinpath(f"rank{rank}.json").write_text(json.dumps(content))
    return Trace.load(folder)


def test_mismatch_is_not_reported_while_ranks_are_missing(tmp_path: Path) -> None:
    contents = [profile_events(0), profile_events(5)]
    contents[1]["traceEvents"][0]["name"] = "c10d::broadcast_"
    for content in contents:
        content["distributedInfo"]["world_size"] = 128
        content["distributedInfo"]["pg_config"][1]["ranks"] = [0, 5]
    trace = load_profiles(tmp_path, *contents)
    (finding,) = trace.diagnose()
    assert finding.kind == "incomplete_recording"
    assert finding.message.startswith("ranks 1, 2, 3 … 127 (126 in all) of 128 are missing: ")
    assert trace.ranks == [0, 5]
    picture = repr(dk.Timeline(trace))
    assert "2 ranks" in picture and "126 in all" in picture


def test_profile_without_communication_is_reported(tmp_path: Path) -> None:
    content = profile_events(0)
    content["traceEvents"] = content["traceEvents"][2:]
    content.pop("distributedInfo")
    (finding,) = load_profiles(tmp_path, content).diagnose()
    assert finding.message.startswith("the profile contains no communication")
    content["traceEvents"].pop()
    with pytest.raises(TraceFileError, match=r"rank0.json: no .* calls were found"):
        load_profiles(tmp_path, content)


def test_dumps_without_calls_raise(tmp_path: Path) -> None:
    with pytest.raises(TraceFileError, match=r"2 files, .*: no torch.distributed calls were found"):
        load(tmp_path, dump(entry(0, "coalesced")), dump())


def containers(value: Any) -> list[tuple[Any, Any]]:
    """Return each container in a JSON value, with each of its keys."""
    pairs = enumerate(value) if isinstance(value, list) else getattr(value, "items", list)()
    return [pair for key, item in pairs for pair in [(value, key), *containers(item)]]


NOISE = st.sampled_from([None, True, -5, 0.5, 10**9, 10**400, "", "x", [], ["x"], [-1], {}])


@given(st.data())
def test_damaged_profile_loads_or_raises(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    content = json.loads(json.dumps(profile_events(0)))
    container, key = data.draw(st.sampled_from(containers(content)))
    container[key] = data.draw(NOISE)
    file = tmp_path_factory.getbasetemp() / "damaged_0"
    file.write_text(json.dumps(content))
    try:
        trace = Trace.load(file)
    except TraceFileError as error:
        assert str(file) in str(error)
    else:
        trace.diagnose()
        assert Trace.load(trace.save(tmp_path_factory.getbasetemp() / "again")) == trace
