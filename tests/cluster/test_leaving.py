"""A script that exits during a run prints only the user's error."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_SCRIPT = """
import signal, threading, weakref
class Early: pass
early = Early()
weakref.finalize(early, int)  # as many libraries do: finalizers' turn at exit comes late then
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
going = threading.Event()
run.subscribe(lambda events: going.set())
assert going.wait(120) and not run.finished
"""


def leave(how: str, folder: Path) -> subprocess.CompletedProcess[str]:
    script = folder / "mine.py"
    script.write_text(_SCRIPT + how + "\n")
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
    ("how", "code", "last"),
    [
        ("", 0, ""),
        ("signal.raise_signal(signal.SIGINT)", -2, "KeyboardInterrupt"),
    ],
    ids=["ends", "Ctrl-C"],
)
def test_kernel_exit_during_a_run_leaves_no_process(
    how: str, code: int, last: str, tmp_path: Path
) -> None:
    left = leave(how, tmp_path)
    message = left.stderr.splitlines()
    assert left.returncode == code, left.stderr
    assert message[-1:] == [last] * bool(last), left.stderr
    assert len([x for x in message if not x.startswith(" ")]) == 2 * bool(last), left.stderr
    assert left.stdout == ""
