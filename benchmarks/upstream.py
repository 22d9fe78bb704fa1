"""Torch's own tests of ``torch.distributed`` on gloo, with the recorder and without.

A test must end the same way with both. The tests are those that torch ships
(``torch.testing._internal.distributed``); they need the package ``expecttest``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.figure import Figure, figure

#: Runs the tests in forked ranks; ``argv``: whether to record, and the file for the outcomes.
TESTS = """
import json, os, sys, unittest
record, out = sys.argv[1] == "record", sys.argv[2]
sys.argv = sys.argv[:1]
import torch
from torch.testing._internal.distributed.distributed_test import DistributedTest, TestDistBackend

class Tests(TestDistBackend, DistributedTest._DistTestBase):
    def setUp(self):
        super().setUp()
        self._start_processes(torch.multiprocessing.get_context("fork").Process)

def record_all():
    from distkit.recording.recorder import Flusher, Recorder, set_current
    from distkit.recording.tap import tap
    tap.install()
    mine = Recorder(0)
    set_current(mine)
    Flusher(mine, lambda kind, what: None)

if record:
    import distkit.recording.tap
    os.register_at_fork(after_in_child=record_all)

class Outcomes(unittest.TestResult):
    found = {}
    def note(self, test, how):
        self.found[test._testMethodName] = how
    def addSuccess(self, test):
        self.note(test, "passed")
    def addSkip(self, test, why):
        self.note(test, "skipped")
    def addFailure(self, test, error):
        self.note(test, "failed")
    addError = addFailure

names = [name for name in dir(Tests) if name.startswith("test_")]
unittest.TestSuite(map(Tests, names)).run(Outcomes())
json.dump(Outcomes.found, open(out, "w"))
"""


def measure(reps: int, say: Callable[[str], None]) -> tuple[list[Figure], dict[str, Any]]:
    """Tests that end in another way when they are recorded."""
    stock, recorded = _outcomes("stock", say), _outcomes("record", say)
    other = {
        name: [how, recorded.get(name)] for name, how in stock.items() if recorded.get(name) != how
    }
    return [
        figure(
            f"of {len(stock)} tests of torch.distributed: that end otherwise when recorded",
            "tests",
            [float(len(other))],
            must=0,
            aim=0,
            absolute=True,
        ),
    ], {"stock": dict(Counter(stock.values())), "other": other}


def _outcomes(how: str, say: Callable[[str], None]) -> dict[str, str]:
    say(f"upstream: {how}")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "barrier").touch()
        around = {
            **os.environ,
            "BACKEND": "gloo",
            "WORLD_SIZE": "2",
            "TEMP_DIR": folder,
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
        }
        out = Path(folder, "outcomes.json")
        subprocess.run(
            [sys.executable, "-c", TESTS, how, str(out)],
            env=around,
            check=True,
            capture_output=True,
        )
        found: dict[str, str] = json.loads(out.read_text())
    return found
