"""Rank files, which are written during a run and merged."""

from __future__ import annotations

import errno
import math
import os
import struct
import time
import zlib
from pathlib import Path

import pytest

import distkit as dk
from distkit.errors import DeadlockError, RankError, RunError, StepError
from distkit.events import WORLD, Op, State
from distkit.recording.encoding import encode
from distkit.trace.info import ClockOffset
from distkit.trace.trace import Trace
from distkit_hosts.torchrun import merge, rankfile
from distkit_hosts.torchrun.rankfile import RankFile

NAN = float("nan")


def header(rank: int, size: int = 2, *, began: float = 10.0, ahead: float = 0.0, **more):
    """Return the header of a rank that began at ``began``; its clock is ``ahead`` seconds fast."""
    return {
        "rank": rank,
        "world_size": size,
        "host": "a",
        "pid_namespace": "a",
        "pid": 100 + rank,
        "parent": 1,
        "launcher": "torchrun",
        "restart": 0,
        "clock": "a",
        "began": (began + ahead, 1e9 + began),
        "folder": "/srv/ada",
        "program": "train.py",
        **more,
    }


def rows(*calls, ahead: float = 0.0):
    """Return the rows of calls ``(op, start, end[, peer])``; an end of None is a hang."""
    for seq, (op, start, end, *peer) in enumerate(calls):
        fields = (*(peer or [None]), WORLD, 8, (2,), "float32", None, "/srv/ada/t.py:3", (), None)
        yield seq, op, State.STARTED, start + ahead, fields, None
        last = (State.BLOCKED, start) if end is None else (State.COMPLETED, end)
        yield seq, op, last[0], last[1] + ahead, fields, ((1.0, NAN), 1.0, 1.0, NAN, 2, False)


def write(folder: Path, fields, calls=(), *, end=None, until=None, ahead=0.0) -> Path:
    """Write the file of a rank."""
    name = f"{fields['rank']}-{fields['host']}-{fields['pid']}-{fields['restart']}.rank"
    file = RankFile(folder / name, fields)
    file.write_rows([*rows(*calls, ahead=ahead)])
    last = fields["began"][0] if until is None else until + ahead
    file.note("beat", (last, fields["began"][1] + last - fields["began"][0], None, 0, 0, {}, False))
    if end is not None:
        file.note("end", (end, "", "", last))
    file.close()
    return folder / name


# -- one file ------------------------------------------------------------------------------------


def test_truncated_file_is_readable(tmp_path: Path) -> None:
    calls = [(Op.BARRIER, 11.0 + n, 11.5 + n) for n in range(3)]
    path = tmp_path / "0.rank"
    file = RankFile(path, header(0))
    for n in range(3):
        file.write_rows([*rows(*calls)][2 * n : 2 * n + 2])
    file.close()
    content = path.read_bytes()
    counts = []
    for size in range(
        len(rankfile.MAGIC) + 8 + len(encode(("about", header(0)))), len(content) + 1, 3
    ):
        path.write_bytes(content[:size])
        counts.append(len(rankfile.read(path).rows))
    assert counts == sorted(counts)
    assert {*counts} >= {0, 2, 4}
    damaged = bytearray(content)
    damaged[-1] ^= 1
    path.write_bytes(damaged)
    assert len(rankfile.read(path).rows) == 4


def test_full_disk_stops_recording_but_not_the_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = RankFile(tmp_path / "0.rank", header(0))

    def full(*args: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    for _ in range(2):
        file.write_rows([*rows((Op.BARRIER, 11.0, 12.0))])
    assert file.lost == 4
    assert capsys.readouterr().err.count("No space left on device") == 1
    file.close()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"distkit-rank 9\n", "a different version of distkit"),
        (rankfile.MAGIC, "the file is empty"),
    ],
)
def test_unreadable_file_raises(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "x.rank").write_bytes(content)
    with pytest.raises(dk.errors.TraceFileError, match=message):
        Trace.load(tmp_path)


@pytest.mark.parametrize(
    "chunk",
    [
        "text",
        ("rows", encode(([], [["x"]]))),
        ("rows", encode(([], [[0, "send", "started", 1.0, 7, None]]))),
        ("rows", encode(([()], [[0, "leap", "started", 1.0, 0, None]]))),
        ({}, 1),
    ],
)
def test_inconsistent_file_raises(tmp_path: Path, chunk: object) -> None:
    path = write(tmp_path, header(0))
    packed = encode(chunk)
    with path.open("ab") as file:
        file.write(struct.pack("<II", len(packed), zlib.crc32(packed)) + packed)
    with pytest.raises(dk.errors.TraceFileError, match=r"0\.rank: damaged"):
        Trace.load(path)


# -- several files -------------------------------------------------------------------------------


def test_ranks_of_one_host_are_merged_exactly(tmp_path: Path) -> None:
    write(tmp_path, header(0), [(Op.SEND, 11.0, 12.0, 1)], end="returned", until=13.0)
    write(tmp_path, header(1), [(Op.RECV, 11.5, 12.5, 0)], end="returned", until=13.5)
    trace = Trace.load(tmp_path)
    (message,) = trace.messages
    assert (message.src, message.dst, message.sent, message.received) == (0, 1, 11.0, 12.5)
    assert trace.events[0].where == "t.py:3"
    assert trace.info.name == "train.py"
    assert trace.info.until == 13.5
    assert not trace.info.clocks
    assert trace.diagnose() == []
    reloaded = Trace.load(trace.save(tmp_path / "whole.gz"))
    assert (repr(reloaded.events), reloaded.info) == (repr(trace.events), trace.info)
    assert len(Trace.load([*tmp_path.glob("*.rank")])) == len(trace)


@pytest.mark.parametrize("ahead", [5.0, -1e6])
def test_clocks_of_two_hosts_are_aligned(tmp_path: Path, ahead: float) -> None:
    calls = [(Op.ALL_REDUCE, 11.0 + n, 11.0005 + n + 1e-4 * (n % 3)) for n in range(5)]
    late = [(op, start + 2e-4, end) for op, start, end in calls]
    remote = header(1, host="b", clock="b", ahead=ahead)
    write(tmp_path, header(0), [*calls, (Op.RECV, 17.0, 18.0, 1)], end="returned", until=20.0)
    sender = [*late, (Op.SEND, 17.9, 17.95, 0)]
    write(tmp_path, remote, sender, end="returned", until=20.0, ahead=ahead)
    trace = Trace.load(tmp_path)
    assert trace.info.clocks["b"].ahead == pytest.approx(ahead, abs=5e-4)
    assert trace.info.clocks["b"].error < 2e-3
    assert trace.info.clocks["a"] == ClockOffset(0.0, 0.0)
    assert [rank.host for rank in trace.info.ranks.values()] == ["a", "b"]
    (message,) = trace.messages
    assert message.sent < message.received
    assert message.sent == pytest.approx(17.9, abs=1e-3)
    for spans in trace.collectives:
        assert max(s.start for s in spans) < min(s.end for s in spans)


def test_wall_clocks_are_used_without_messages(tmp_path: Path) -> None:
    remote = header(1, host="b", clock="b", ahead=7.0)
    write(tmp_path, header(0), end="returned")
    write(tmp_path, remote, [(Op.BARRIER, 11.0, None)], ahead=7.0, until=12.0)
    trace = Trace.load(tmp_path)
    assert trace.info.clocks["b"] == ClockOffset(pytest.approx(7.0, abs=0.01))
    assert trace.info.clocks["b"].error is None  # unknown without messages
    assert trace.events[0].time == pytest.approx(11.0, abs=0.01)


def test_impossible_times_are_reported(tmp_path: Path) -> None:
    """Messages are received before they are sent, in both directions."""
    one, other = (
        [(Op.SEND, 12.0, 12.1, 1), (Op.RECV, 12.2, 12.3, 1)],
        [
            (Op.RECV, 11.0, 11.1, 0),
            (Op.SEND, 13.0, 13.1, 0),
        ],
    )
    write(tmp_path, header(0), one, end="returned", until=14.0)
    write(tmp_path, header(1, host="b", clock="b"), other, end="returned", until=14.0)
    trace = Trace.load(tmp_path)
    assert "cannot be aligned" in trace.info.limitations["clocks"].text
    assert [c.error for c in trace.info.clocks.values()] == [0.0, None]


def test_rank_without_a_final_record_is_reported_as_dead(tmp_path: Path) -> None:
    killed = write(tmp_path, header(0, 3), [(Op.BARRIER, 11.0, 11.5)], until=12.0)
    ended = write(
        tmp_path, header(1, 3), [(Op.BARRIER, 11.0, 11.5), (Op.RECV, 12, None, 0)], until=15
    )
    crash = write(tmp_path, header(2, 3), [(Op.BARRIER, 11.0, 11.5)], until=12.5)
    ended.with_suffix(".fault").write_text('Current thread 0x1:\n  File "t.py", line 9 in f\n')
    crash.with_suffix(".fault").write_text(
        "Fatal Python error: Segmentation fault\n\nCurrent thread 0x1 (most recent call first):\n"
        '  File "/usr/lib/python3.11/site-packages/x.py", line 1 in g\n'
        '  File "/srv/ada/t.py", line 9 in f\n\nExtension modules: x'
    )
    trace = Trace.load(tmp_path)
    ends = trace.info.ends
    assert [ends[r].how for r in range(3)] == ["died", "released", "died"]
    assert "without a report" in ends[0].text
    assert (ends[2].text, ends[2].where) == ("signal SIGSEGV", "t.py:9")
    assert (ends[0].time, ends[2].time) == (12.0, 12.5)
    findings = " ".join(map(str, trace.diagnose()))
    assert "the process of rank 0 exited (without a report" in findings
    assert "rank 1 waits in recv(src=0)" in findings
    assert "the process of rank 2 exited (signal SIGSEGV) at t.py:9" in findings
    assert killed.exists()


def test_latest_run_in_a_folder_is_read(tmp_path: Path) -> None:
    for parent, began in ((1, 10.0), (2, 30.0)):
        for rank in (0, 1):
            fields = header(rank, began=began, parent=parent, pid=10 * parent + rank)
            write(
                tmp_path,
                fields,
                [(Op.BARRIER, began + 1, began + 2)],
                end="returned",
                until=began + 3,
            )
    trace = Trace.load(tmp_path)
    assert [e.time for e in trace.events] == [31.0, 31.0, 32.0, 32.0]
    assert not trace.info.limitations


@pytest.mark.parametrize("here", [True, False])
def test_pid_from_another_namespace_is_not_looked_up(tmp_path: Path, here: bool) -> None:
    """This namespace has a process with the pid of the silent rank."""
    fields = {"clock": rankfile.clock(), "pid": os.getpid()}
    fields |= {"pid_namespace": rankfile.pid_namespace() if here else "another"}
    fields |= {"began": (time.monotonic() - 60, time.time())}  # silent for a minute
    write(tmp_path, header(0) | fields, end="returned")
    write(tmp_path, header(1) | fields)
    assert (1 in Trace.load(tmp_path).info.ends) is not here


# -- restarted ranks -----------------------------------------------------------------------------


def record_restarted_run(folder: Path) -> Trace:
    """Return a run in which rank 1 is killed after a collective, and two of three ranks restart."""
    calls = [(Op.ALL_REDUCE, 11.0, 11.1), (Op.ALL_REDUCE, 12.0, None)]
    for rank in range(3):
        path = write(
            folder, header(rank, 3), calls[: 1 if rank == 1 else 2], until=12.5 + (rank != 1)
        )
        if rank != 1:
            path.with_suffix(".fault").write_text("Current thread 0x1:\n")
    for rank in range(2):
        fields = header(rank, began=20.0, restart=1, pid=200 + rank)
        ring = [(Op.SEND, 22.0, 22.1, 1 - rank), (Op.RECV, 22.2, 22.3, 1 - rank)]
        restarted_calls = [(Op.ALL_REDUCE, 21.0 + n / 10, 21.05 + n / 10) for n in range(3)]
        write(folder, fields, [*restarted_calls, *ring], end="returned", until=23.0)
    return Trace.load(folder)


@pytest.mark.parametrize("recent", [0.0, math.inf])  # torchrun restarts ranks within a second
def test_latest_restart_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recent: float
) -> None:
    monkeypatch.setattr(merge, "RECENT", recent)
    trace = record_restarted_run(tmp_path)
    assert (trace.ranks, trace.info.groups) == ([0, 1], {WORLD: [0, 1]})
    assert [*map(len, trace.collectives)] == [2, 2, 2]
    assert [(m.src, m.dst) for m in trace.messages if m.received] == [(0, 1), (1, 0)]
    (found,) = trace.diagnose()
    notice = "started 2 times, and only the latest attempt is shown."
    assert notice in found.message and not found.hang
    assert notice in dk.Timeline(trace).save(tmp_path / "x.svg").read_text()
    reloaded = Trace.load(trace.save(tmp_path / "whole.gz"))
    assert (repr(reloaded.events), reloaded.info) == (repr(trace.events), trace.info)
    old = Trace.load([path for path in tmp_path.glob("*.rank") if "-0.rank" in path.name])
    assert (old.ranks, old.info.limitations) == ([0, 1, 2], {})


def test_stale_addresses_after_a_restart_are_explained(tmp_path: Path) -> None:
    reason = "RuntimeError: Gloo connectFullMesh failed with timed out connecting: SO_ERROR"
    for rank in range(2):
        path = write(tmp_path, header(rank), [(Op.BARRIER, 11.0, None)], until=12.0)
        path.with_suffix(".fault").write_text("Current thread 0x1:\n")
        fields = header(rank, began=20.0, restart=1, pid=200 + rank)
        file = RankFile(tmp_path / f"again-{rank}.rank", fields)
        file.note("end", ("raised", reason, "/srv/ada/t.py:2", 21.0))
        file.close()
    (found,) = (f for f in Trace.load(tmp_path).diagnose() if f.lines.get(0) == "t.py:2")
    assert found.message.startswith(
        "ranks 0 and 1 raised RuntimeError: Gloo connectFullMesh failed"
    )
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in found.remedy


# -- following a run -----------------------------------------------------------------------------


def write_waiting_rank(folder: Path, rank: int, **more) -> Path:
    """Write the file of a rank that waits for a message from the other rank."""
    file = RankFile(folder / f"{rank}.rank", header(rank, **more))
    file.write_rows([*rows((Op.RECV, 11.0, None, 1 - rank))])
    file.note("beat", (13.0, 1e9 + 13, ((0,), 11.0, 13.0), 0, 0, {}, False))
    file.close()
    return folder / f"{rank}.rank"


def test_follow_prints_that_it_waits_for_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, header(0))
    with pytest.raises(TimeoutError, match="1 of 2 ranks have started"):
        dk.hosts.follow(tmp_path, timeout=0.0)
    assert capsys.readouterr().out == f"Waiting up to 0 s for all ranks to start in {tmp_path}.\n"
    write(tmp_path, header(1))
    assert not dk.hosts.follow(tmp_path).finished
    assert capsys.readouterr().out == ""


def test_remote_hang_is_reported_but_ranks_continue(tmp_path: Path) -> None:
    write_waiting_rank(tmp_path, 0)
    write_waiting_rank(tmp_path, 1)
    run = dk.hosts.follow(tmp_path)
    with pytest.raises(DeadlockError, match=r"rank 0 waits in recv\(src=1\) at t.py:3, rank 1"):
        run.wait(60)
    assert (run.ends, run.finished) == ({}, False)
    with pytest.raises(StepError, match=r"train.py cannot .*\(ranks 0 and 1: on a\)\. All ranks"):
        run.step()
    with pytest.raises(RunError, match=r"no rank of train\.py can be reached"):
        run.interrupt()


def test_hang_does_not_raise_if_the_clock_offset_is_unknown(
    tmp_path: Path,
) -> None:
    write_waiting_rank(tmp_path, 0)
    write_waiting_rank(tmp_path, 1, host="b", clock="b")  # no message bounds the clock offset
    run = dk.hosts.follow(tmp_path)
    with pytest.raises(TimeoutError, match=r"train\.py is still running"):
        run.wait(0.0)
    assert "running" in repr(run)
    assert run.findings[0].hang  # not certain: the clock offset is unknown


def test_outcomes_of_finished_ranks_are_reported(tmp_path: Path) -> None:
    write(tmp_path, header(0), [(Op.BARRIER, 11.0, 12.0)], end="returned")
    file = RankFile(tmp_path / "1.rank", header(1))
    file.note("end", ("raised", "ValueError: on purpose", "/srv/ada/t.py:7", 12.0))
    file.close()
    run = dk.hosts.follow(tmp_path)
    assert run.ends == {0: "returned", 1: "raised ValueError: on purpose at t.py:7"}
    assert "failed: rank 1 raised ValueError: on purpose" in repr(run)
    with pytest.raises(RankError, match="ValueError: on purpose"):
        run.wait()
    with pytest.raises(StepError, match="ranks 0 and 1: ended"):
        run.step()
