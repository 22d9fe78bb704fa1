"""Ranks started by torchrun, recorded from outside and from inside."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest
from ports import reserved_port
from waiting import background_process, wait_until

import distkit as dk
from distkit.diagnosis.rank_state import RankStatus
from distkit.errors import DeadlockError, RunInterrupted, StepError, TraceFileError
from distkit.events import Event, Op, State
from distkit.trace.trace import Trace
from distkit.views.widget.view import Live
from distkit_hosts.torchrun.rankfile import find_files, read

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
TWO = [*TORCHRUN, "--standalone", "--nproc-per-node=2"]
DISTKIT = [sys.executable, "-m", "distkit"]
TRACE = [*DISTKIT, "trace", "--", *TWO, "train.py"]
ROOT = Path(__file__).parents[2]
LONG = 240

TRAINS = """
import os, sys
import torch, torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
x = torch.full((4,), rank + 1.0)
for _ in range(3):
    dist.all_reduce(x)
if rank == 0:
    dist.send(x, 1)
else:
    dist.recv(x, 0)
print(f"[{__name__} {sys.argv[1:]} {x[0].item():g}]")
dist.destroy_process_group()
"""

DIES = """
import os, signal
import torch, torch.distributed as dist

# Use a file for each start: in torchrun's store, restarted ranks find the addresses of earlier
# ones (pytorch#135712), and the port of another store could be taken before rank 0 binds it.
start, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], int(os.environ["RANK"])
dist.init_process_group("gloo", f"file://{os.getcwd()}/{start}", rank=rank, world_size=2)
for step in range(3):
    dist.all_reduce(torch.ones(2))
    if step == 1 and rank == 1 and start == "0":
        os.kill(os.getpid(), signal.SIGKILL)
dist.destroy_process_group()
"""

HANGS = """
import torch, torch.distributed as dist

dist.init_process_group("gloo")
dist.recv(torch.ones(4), src=1 - dist.get_rank())
"""

LIMITED = """
from datetime import timedelta
import torch, torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=1))
if dist.get_rank() == 0:
    dist.all_reduce(torch.ones(4))
else:
    dist.barrier()
    dist.barrier()
"""

BARRIERS = """
import torch.distributed as dist

dist.init_process_group("gloo")
dist.barrier()
dist.barrier()
dist.destroy_process_group()
"""


ATTACHES = """
import distkit as dk
dk.hosts.record("here")
import torch, torch.distributed as dist
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

if __name__ == "__main__":
    dk.hosts.record("here")  # a second call does nothing
    dist.init_process_group("gloo")
    dist.barrier()
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:  # imports this file
        pool.submit(int).result()
    if dist.get_rank() == 1:
        raise ValueError("on purpose")
    dist.recv(torch.ones(1), src=1)
"""


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT}/companions")
    monkeypatch.chdir(tmp_path)


def run(*command: str, script: str, status: int = 0) -> str:
    """Run a command on train.py; check its exit status and return its output."""
    Path("train.py").write_text(script)
    ran = subprocess.run(command, capture_output=True, text=True, timeout=LONG)
    assert ran.returncode == status, ran.stdout + ran.stderr
    return " ".join((ran.stdout + ran.stderr).split())


def test_script_is_recorded_unchanged() -> None:
    output = run(*TRACE, "--lr", "1", script=TRAINS)
    assert output.count("[__main__ ['--lr', '1'] 12]") == 2
    assert "1 message, 3 collectives. Saved in trace.gz." in output
    trace = Trace.load("trace")
    assert len(trace) == len(Trace.load("trace.gz")) > 0
    assert trace.diagnose() == []
    assert [span.where for span in trace.by_rank[0][:1]] == ["train.py:9"]
    assert {end.how for end in trace.info.ends.values()} == {"returned"}
    assert trace.info.sources["train.py"] == TRAINS
    (message,) = trace.messages
    assert message.sent < message.received
    # only rank files remain, without the black boxes of ranks that exited normally
    assert {path.suffix for path in Path("trace").iterdir()} == {".rank"}


def test_rank_death_restarts_all_ranks() -> None:
    command = [*DISTKIT, "trace", "--out", "t", "--", *TWO, "--max-restarts=1", "train.py"]
    output = run(*command, script=DIES)
    assert "the ranks were started 2 times, and only the latest attempt is shown." in output
    trace = Trace.load("t.gz")
    assert {end.how for end in trace.info.ends.values()} == {"returned"}
    assert [s.state for s in trace.spans if s.op is not Op.MARK] == [State.COMPLETED] * 6
    killed = min(Path("t").glob("00001-*.rank"), key=lambda path: path.stat().st_mtime)
    # the last calls of the killed rank are present, although it did not write them
    assert [s.op for s in Trace.load([killed]).spans] == [Op.ALL_REDUCE] * 2


def test_hang_killed_by_a_signal_is_explained() -> None:
    Path("train.py").write_text(HANGS)
    with background_process(TRACE, stdout=subprocess.PIPE) as process:
        wait_until(waiting, timeout=LONG)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=LONG)
    assert "rank 0 waits in recv(src=1) at train.py:5, rank 1 waits" in " ".join(output.split())
    assert process.returncode != 0
    assert Trace.load("trace.gz").info.ends[0].how == "released"


def waiting() -> bool:
    """Return whether two ranks have reported that they are blocked."""
    paths = [Path("trace")] if Path("trace").is_dir() else []
    with suppress(TraceFileError):  # a rank has just created its file
        return [row[2] for p in find_files(paths) for row in read(p).rows].count(State.BLOCKED) == 2
    return False


def test_hang_is_diagnosed_and_interrupted_from_a_notebook() -> None:
    Path("train.py").write_text(HANGS)
    with background_process(TRACE, stderr=subprocess.PIPE) as process:
        run = dk.hosts.follow(timeout=LONG)
        message = "rank 0 waits in recv(src=1) at train.py:5, rank 1 waits in recv(src=0)"
        with pytest.raises(DeadlockError, match=re.escape(message)):
            run.wait(LONG)
        assert (run.ends, run.finished) == ({}, False)  # no rank is stopped without a request
        run.interrupt()
        _, output = process.communicate(timeout=LONG)
    assert "Released: ended by a notebook that follows the run\n[rank" in output
    for rank in (0, 1):
        assert f"[rank{rank}]: {message}" in output
    assert "recv(x, " not in output  # no torch frames
    with pytest.raises(RunInterrupted, match="their launcher decides what happens next"):
        run.wait(LONG)
    assert run.ends == {0: "released", 1: "released"}
    assert len(list(Path("trace").iterdir())) == 2


STEPPED = """
import sys, time
import torch, torch.distributed as dist
from pathlib import Path

dist.init_process_group("gloo")
done = torch.zeros(1)
while not done:
    done.fill_(dist.get_rank() == 0 and Path(sys.argv[1]).exists())
    dist.all_reduce(done)
    time.sleep(0.05)
dist.destroy_process_group()
"""

STEPS = """
import sys
import distkit as dk

stepper = dk.hosts.follow(timeout=float(sys.argv[1])).step()
print(*[state.status for state in stepper.next().moment.rank_states], flush=True)
sys.stdin.read()
"""


@pytest.mark.stress
def test_stepped_ranks_outlive_the_notebook(tmp_path: Path) -> None:
    Path("train.py").write_text(STEPPED)
    stop_file = tmp_path / "stop"
    running = subprocess.Popen([*TRACE, str(stop_file)])
    try:
        run = dk.hosts.follow(timeout=LONG)
        stepper = run.step()
        calls = [len(stepper.next().trace.spans) for _ in range(3)]
        assert calls[2] - calls[1] == calls[1] - calls[0] == 2  # one from each rank
        blocked = stepper.next(rank=1).moment.rank_states
        assert [s.status for s in blocked] == [RankStatus.PAUSED, RankStatus.BLOCKED]
        assert {e.summary.values for e in stepper.trace.events[-6:] if e.summary} == {(0.0,)}
        with subprocess.Popen(
            [sys.executable, "-c", STEPS, "60"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as second:  # only one notebook can step the ranks
            assert "does not respond" in second.communicate(timeout=LONG)[1].decode()
        stepper.resume_all()
        seen = len(run.trace)
        wait_until(lambda: len(run.trace) > seen, timeout=LONG)
        for channel in run._control._channels.values():
            channel.shutdown()  # as if the kernel had exited
        with background_process(
            [sys.executable, "-c", STEPS, str(LONG)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as notebook:
            assert notebook.stdout.readline().split() == ["paused", "paused"]
            notebook.kill()
        stop_file.touch()
        assert running.wait(LONG) == 0
    finally:
        running.terminate()
        running.wait(LONG)
    assert run.wait(LONG).ends == {0: "returned", 1: "returned"}
    with pytest.raises(StepError, match="ranks 0 and 1: ended"):
        run.step()


def test_hang_that_exceeds_torchs_timeout_is_explained() -> None:
    output = run(*TRACE, script=LIMITED, status=1)
    assert "rank 0 calls all_reduce() at train.py:7, rank 1 calls barrier() at train.py:9" in output


def test_script_attaches_itself() -> None:
    assert "ValueError: on purpose" in run(*TWO, "train.py", script=ATTACHES, status=1)
    assert len([*Path("here").glob("*.rank")]) == 2
    trace = Trace.load("here")
    assert trace.info.ends[1].text == "ValueError: on purpose"
    assert "rank 1 raised ValueError: on purpose at train.py:15" in str(trace.diagnose()[0])


def test_traceback_begins_in_the_script() -> None:
    command = [*DISTKIT, "trace", "--", sys.executable, "train.py"]
    output = run(*command, script="def f():\n    1 / 0\nf()\n", status=1)
    traceback = output.partition("Traceback (most recent call last): ")[2]
    assert traceback.startswith('File "') and traceback.index("train.py") < traceback.index(",")
    assert "attach" not in output
    assert "ZeroDivisionError" in traceback
    assert "Traceback" not in run(*command, script="raise SystemExit(3)", status=3)
    assert Trace.load("trace").info.ends[0].text == "SystemExit: 3"


@pytest.mark.stress
def test_two_nodes_write_into_one_folder() -> None:
    Path("train.py").write_text(BARRIERS)
    with reserved_port() as port:
        command = [
            *(*DISTKIT, "trace", "--out", "shared", "--"),
            *(*TORCHRUN, "--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d"),
            *(f"--rdzv-endpoint=127.0.0.1:{port}", "train.py"),
        ]
        both = [subprocess.Popen(command) for _ in range(2)]
        assert [process.wait(LONG) for process in both] == [0, 0]
    trace = Trace.load("shared")
    assert trace.ranks == [0, 1]
    assert not trace.info.clocks  # they are on one machine
    assert len(trace.collectives) == 2
    assert Path("shared.gz").exists()


CONTINUES = """
import sys, time
import torch, torch.distributed as dist
from pathlib import Path

dist.init_process_group("gloo")
x = torch.ones(2)
dist.all_reduce(x)
while not Path(sys.argv[1]).exists():
    time.sleep(0.05)
dist.all_reduce(x)
dist.destroy_process_group()
"""


def test_running_job_is_followed(tmp_path: Path) -> None:
    script, stop_file = tmp_path / "continues.py", tmp_path / "stop"
    script.write_text(CONTINUES)
    command = [*DISTKIT, "trace", "--", *TWO, str(script), str(stop_file)]
    with background_process(command, cwd=tmp_path) as running:
        run = dk.hosts.follow(tmp_path / "trace", timeout=LONG)
        received: list[Event] = []
        ended = threading.Event()
        run.subscribe(lambda events: received.extend(events) if events else ended.set())
        wait_until(lambda: sum(e.state is State.COMPLETED for e in received) == 2, timeout=LONG)
        assert not run.finished
        assert isinstance(run, Live)
        stop_file.touch()
        assert ended.wait(LONG)
        running.wait(LONG)
    late = dk.hosts.follow(tmp_path / "trace")
    batches: list[list[Event]] = []
    late.subscribe(batches.append)  # a finished run reports its end immediately
    assert [len(events) for events in batches] == [14, 0]
    assert run.finished
    assert len(received) == len(run.trace.events) == 14
    assert not run.findings
