"""The command line, run as a process with real ranks."""

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from waiting import background_process, until_line

from distkit import Trace

DISTKIT = [sys.executable, "-m", "distkit"]
SCRIPT = """
import sys
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
x = torch.ones(3)
dist.all_reduce(x)
print("argument", sys.argv[1], x.tolist())
if sys.argv[1] == "fail" and dist.get_rank() == 1:
    raise ValueError("on purpose")
if sys.argv[1] == "hang":
    print("waiting", flush=True)
    dist.recv(x, src=1 - dist.get_rank())
dist.destroy_process_group()
"""


def distkit(folder: Path, *argv: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*DISTKIT, *argv], cwd=folder, capture_output=True, text=True, timeout=120
    )


def test_trace_records_a_script(tmp_path: Path, leftovers: Callable[[], list[str]]) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    completed = distkit(
        tmp_path, "trace", "--ranks", "2", "--out", "t.gz", "--", "train.py", "succeed"
    )
    assert completed.returncode == 0, completed.stderr
    *printed, last = completed.stdout.splitlines()
    assert sorted(printed) == [f"[rank {r}] argument succeed [2.0, 2.0, 2.0]" for r in range(2)]
    assert last.startswith("2 ranks, ")
    assert last.endswith("0 messages, 1 collective. Saved in t.gz.")
    lines = {e.op.name: e.where for e in Trace.load(tmp_path / "t.gz")}
    # destroying the group adds a mark
    assert lines == {"ALL_REDUCE": "train.py:8", "MARK": "train.py:15"}
    assert not leftovers()


def test_trace_reports_the_error_of_a_script_and_saves_its_events(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    completed = distkit(tmp_path, "trace", "--ranks", "2", "--", "train.py", "fail")
    assert completed.returncode == 1
    assert completed.stderr.startswith(
        "distkit: rank 1 raised ValueError: on purpose at train.py:11"
    )
    assert "distkit/cli.py" not in completed.stderr
    assert len(Trace.load(tmp_path / "trace.gz")) > 0


def test_ctrl_c_terminates_all_ranks(tmp_path: Path, leftovers: Callable[[], list[str]]) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [*DISTKIT, "trace", "--ranks", "2", "--", "train.py", "hang"]
    with background_process(command, cwd=tmp_path, stdout=-1, stderr=-1) as running:
        assert [*until_line(running, "waiting\n")]
        running.send_signal(signal.SIGINT)
        _, message = running.communicate(timeout=30)
    assert running.returncode == 130
    assert message == "\ndistkit: interrupted\n"
    assert not leftovers()
