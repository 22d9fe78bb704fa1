"""run_ranks: results, recording and failures of ranks."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from training import sum_over_ranks
from waiting import wait_until

import distkit as dk
from distkit.cluster import Run
from distkit.events import Op, State, Summary
from distkit.recording.recorder import summarize
from distkit.views.timeline.columns import Columns
from distkit.views.timeline.static import to_svg


def test_results_are_ordered_by_rank() -> None:
    assert dk.run_ranks(dist.get_rank, 3).results == [0, 1, 2]
    assert dk.run_ranks(sum_over_ranks, 3).results == [6.0, 6.0, 6.0]


def load_slowly() -> float:
    """Load slowly on rank 1, like a first import."""
    time.sleep(0.2 * dist.get_rank())
    return time.monotonic()


class SlowlyLoaded:
    def __reduce__(self) -> tuple[Callable[[], float], tuple[()]]:
        return load_slowly, ()


def test_ranks_start_the_function_together() -> None:
    def times(loaded: float) -> tuple[float, float]:
        return loaded, time.monotonic()

    loaded, entered = zip(*dk.run_ranks(times, 2, SlowlyLoaded()).results, strict=True)
    assert max(loaded) <= min(entered)


def test_missing_rank_does_not_block_the_start() -> None:
    def end_while_loading() -> float:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return time.monotonic()

    class EndsWhileLoading:
        def __reduce__(self) -> tuple[Callable[[], float], tuple[()]]:
            return end_while_loading, ()

    began = time.monotonic()
    with pytest.raises(dk.errors.RankDied, match="rank 1"):
        dk.run_ranks(lambda _: time.sleep(0.01), 3, EndsWhileLoading())
    assert time.monotonic() - began < 15


def test_module_that_the_call_names_is_imported_before_its_ranks_are_forked() -> None:
    assert dk.run_ranks(lambda: "torch.distributed.tensor" in sys.modules, 2).results == [True] * 2


def test_arguments_and_closures_are_pickled() -> None:
    offset = torch.arange(3.0)

    def add(x: int, *, y: int = 0) -> list[float]:
        return (offset + x + y + dist.get_rank()).tolist()

    assert dk.run_ranks(add, 2, 1, y=2).results == [[3.0, 4.0, 5.0], [4.0, 5.0, 6.0]]


def test_prints_are_labeled(capsys: pytest.CaptureFixture[str]) -> None:
    def print_lines() -> None:
        print("one")
        print("two", end="")
        print("to stderr", file=sys.stderr)

    dk.run_ranks(print_lines, 2)
    out, err = capsys.readouterr()
    for rank in (0, 1):
        assert [x for x in out.splitlines() if f"[rank {rank}]" in x] == [
            f"[rank {rank}] one",
            f"[rank {rank}] two",
        ]
        assert f"[rank {rank}] to stderr" in err


def ping() -> list[float]:
    x = torch.arange(2.0) if dist.get_rank() == 0 else torch.zeros(2)
    if dist.get_rank() == 0:
        dist.send(x, dst=1, tag=7)
    else:
        dist.recv(x, src=0, tag=7)
    return x.tolist()


def test_message_is_recorded_at_both_ends_with_values_and_line() -> None:
    trace = dk.run_ranks(ping, 2).trace
    (message,) = trace.messages
    assert (message.src, message.dst, message.nbytes, message.tag) == (0, 1, 8, 7)
    assert message.sent is not None and message.received is not None
    assert message.sent < message.received
    recv = next(s for s in trace.spans if s.op is Op.RECV)
    assert recv.before is None  # the previous content of a receive buffer is not a value
    assert recv.after is not None and recv.after.values == (0.0, 1.0)
    file, _, line = recv.where.rpartition(":")
    source = Path(__file__).read_text().splitlines()
    assert file.endswith("test_run_ranks.py") and "dist.recv(x" in source[int(line) - 1]


def test_stale_buffer_content_is_never_shown() -> None:
    poison = 7.7e31

    def program() -> None:
        rank, old = dist.get_rank(), torch.full((4,), poison)
        mine = torch.ones(4)
        read = mine if rank == 0 else old
        parts = [mine.clone(), mine.clone()]
        dist.broadcast(read.clone(), 0)
        dist.scatter(old.clone(), parts if rank == 0 else None)
        dist.all_gather([old.clone(), old.clone()], mine)
        dist.all_gather_into_tensor(torch.full((8,), poison), mine)
        dist.gather(mine, [old.clone(), old.clone()] if rank == 0 else None)
        dist.reduce_scatter(old.clone(), parts)
        dist.all_to_all_single(old.clone(), mine)
        for send, recv in ((dist.send, dist.recv), (dist.isend, dist.irecv)):
            work = send(mine, 1) if rank == 0 else recv(old.clone(), 0)
            if hasattr(work, "wait"):
                work.wait()
        (dist.send(mine, 1) if rank == 0 else dist.recv(old.clone()))  # from any source

    trace = dk.run_ranks(program, 2).trace
    assert {s.state for s in trace.spans} == {State.COMPLETED}
    assert not [s for s in trace.spans if s.before and s.before.max > 1]
    read = {(str(s.op), s.rank) for s in trace.spans if s.before}
    assert ("broadcast", 0) in read and ("scatter", 0) in read and ("all_gather", 1) in read


# -- failures of ranks ----------------------------------------------------------


def test_failing_rank_is_named_and_the_others_are_released() -> None:
    def program() -> None:
        if dist.get_rank() == 1:
            raise ValueError("a bad batch")
        dist.recv(torch.zeros(1), src=1)

    with pytest.raises(dk.errors.RankError) as caught:
        dk.run_ranks(program, 3)
    error = caught.value
    assert error.rank == 1
    assert str(error).startswith("rank 1 raised ValueError: a bad batch at ")
    assert 'raise ValueError("a bad batch")' in error.traceback
    assert "ranks 0 and 2 wait in recv(src=1) at" in str(error)
    assert isinstance(error.run, Run)
    assert len(error.run.trace) > 0


@pytest.mark.parametrize(("code", "fails"), [("0", False), ("None", False), ("2", True)])
def test_script_can_end_with_exit(tmp_path: Path, code: str, fails: bool) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"import sys\nif len(sys.argv) == 2:\n    sys.exit({code})\n")
    if fails:
        with pytest.raises(dk.errors.RankError, match=r"called sys.exit\(2\)"):
            dk.run_ranks(script, 2, "argument")
    else:
        assert dk.run_ranks(script, 2, "argument").finished


@pytest.mark.parametrize("end", [lambda: os._exit(5), lambda: os.kill(os.getpid(), signal.SIGKILL)])
def test_rank_that_dies_is_named(end: object) -> None:
    def program() -> None:
        dist.barrier()  # the trace begins before the death
        if dist.get_rank() == 1:
            end()  # type: ignore[operator]
        dist.barrier()

    with pytest.raises(
        dk.errors.RankDied, match=r"the process of rank 1 exited .*(exit status 5|SIGKILL)"
    ) as caught:
        dk.run_ranks(program, 2)
    run = caught.value.run
    assert isinstance(run, Run)
    trace = run.trace
    assert trace.start < trace.info.ends[1].time <= trace.info.until
    assert to_svg(Columns(trace).picture()).count(">died<") == 1


def test_unpicklable_object_is_named() -> None:
    lock = threading.Lock()
    with pytest.raises(
        dk.errors.NotPicklableError, match=r"captured variable 'lock' has type _thread.lock"
    ):
        dk.run_ranks(lambda: lock.locked(), 2)
    with pytest.raises(dk.errors.NotPicklableError, match=r"argument 1 has type _thread.lock"):
        dk.run_ranks(len, 2, 1, lock)


def test_unpicklable_result_is_explained() -> None:
    with pytest.raises(
        dk.errors.NotPicklableError,
        match=r"rank \d: .*returned an object of type lock .*plain data",
    ):
        dk.run_ranks(threading.Lock, 2)


@pytest.mark.parametrize("n", [0, -1, 2.5, 10**6])
def test_invalid_numbers_of_ranks_raise(n: int) -> None:
    with pytest.raises(dk.errors.StartError):
        dk.run_ranks(dist.get_rank, n)


@pytest.mark.parametrize(
    ("program", "error", "message"),
    [
        (42, TypeError, "needs a function"),
        ("nowhere.py", FileNotFoundError, "script not found"),
    ],
)
def test_non_callable_raises(program: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        dk.run_ranks(program, 2)  # type: ignore[arg-type]


def test_folders_are_removed_after_the_run(temporary: Path) -> None:
    dk.run_ranks(sum_over_ranks, 2)
    wait_until(lambda: not any(temporary.iterdir()), timeout=5)


def test_folder_that_cannot_be_created_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/proc/no-such-place")
    with pytest.raises(dk.errors.StartError, match="TMPDIR"):
        dk.run_ranks(sum_over_ranks, 2)


def test_summary_samples_all_columns() -> None:
    striped = torch.zeros(128, 64)
    striped[:, 1:] = 1
    fields = summarize(striped)
    assert fields is not None
    summary = Summary(*fields)
    assert set(summary.values) == {0.0, 1.0}
    assert len(summary.values) <= 64
    assert (summary.min, summary.max, summary.size) == (0.0, 1.0, 128 * 64)
    assert summary.norm == pytest.approx((128 * 63) ** 0.5)
    sampled = Summary(*(summarize(torch.ones(1000, 1000)) or ()))
    assert sampled.sampled and sampled.norm == pytest.approx(1000)
    assert summarize(torch.empty(0)) is None


def test_release_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    def program() -> None:
        if dist.get_rank() == 0:
            raise ValueError("mine")
        thread = threading.Thread(target=dist.recv, args=(torch.ones(1), 0))
        thread.start()
        thread.join()

    with pytest.raises(dk.errors.RankError, match="rank 0 raised ValueError: mine"):
        dk.run_ranks(program, 2)
    assert capfd.readouterr() == ("", "")


def test_timed_out_run_shows_its_findings() -> None:
    def cross() -> None:
        dist.recv(torch.zeros(1), src=1 - dist.get_rank())

    with pytest.raises(dk.errors.RunInterrupted, match="did not end within 1 s") as caught:
        dk.run_ranks(cross, 2, timeout=1, wait_forever=True)
    run = caught.value.run
    assert isinstance(run, Run)
    (finding,) = run.findings
    assert str(caught.value).startswith(f"{finding}\n") and finding.hang


def test_ranks_are_killed_at_the_time_limit() -> None:
    def endless() -> None:
        while True:
            signal.signal(signal.SIGINT, signal.SIG_IGN)

    with pytest.raises(dk.errors.RunInterrupted, match="it did not end within 1 s"):
        dk.run_ranks(endless, 2, timeout=1)
    assert dk.run_ranks(dist.get_rank, 2, timeout=100).results == [0, 1]


def test_raw_results_are_bytes() -> None:
    assert dk.run_ranks(lambda: f"rank {dist.get_rank()}".encode(), 2, raw=True).results == [
        b"rank 0",
        b"rank 1",
    ]
    with pytest.raises(dk.errors.RankError, match="bytes-like object is required, not 'int'"):
        dk.run_ranks(dist.get_rank, 2, raw=True)
