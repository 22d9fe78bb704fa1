"""A script that exits during a run prints only the user's error."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

_SCRIPT = """
import signal, threading, weakref
class Early: pass
early = Early()
weakref.finalize(early, int)  # as in many libraries; finalizers then run late at exit
import torch
import distkit as dk
from distkit import kvstore

def count():
    import torch
    kv = kvstore.create("dist_sync")
    kv.init("w", torch.zeros(4))
    while True:
        kv.pull("w")
        kv.push("w", torch.ones(4))

cluster = dk.Cluster(workers=2, servers=1)
run = cluster.submit(count)
running = threading.Event()
run.subscribe(lambda events: running.set())
assert running.wait(120) and not run.finished
"""


def run_script(ending: str, folder: Path) -> subprocess.CompletedProcess[str]:
    script = folder / "script.py"
    script.write_text(_SCRIPT + ending + "\n")
    root = str(Path(__file__).resolve().parents[2])
    return subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": root},
    )


@pytest.mark.parametrize(
    ("ending", "code", "last"),
    [
        ("", 0, ""),
        ("signal.raise_signal(signal.SIGINT)", -2, "KeyboardInterrupt"),
    ],
    ids=["end of script", "Ctrl-C"],
)
def test_exit_during_a_run_prints_only_the_users_error(
    ending: str, code: int, last: str, tmp_path: Path
) -> None:
    completed = run_script(ending, tmp_path)
    message = completed.stderr.splitlines()
    assert completed.returncode == code, completed.stderr
    assert message[-1:] == [last] * bool(last), completed.stderr
    assert len([x for x in message if not x.startswith(" ")]) == 2 * bool(last), completed.stderr
    assert completed.stdout == ""


def test_busy_fork_server_exits_with_its_kernel(leftovers: Callable[[], list[str]]) -> None:
    script = """
from distkit.cluster.processes.fork_client import server
server().preload("tests.support.endless:wait")
"""
    subprocess.run([sys.executable, "-c", script], timeout=240, check=True)
    assert not leftovers()
