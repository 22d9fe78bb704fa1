"""torch's tests of ``torch.distributed`` on gloo have the same outcomes when recorded.

torch ships the tests (``torch.testing._internal.distributed``), which need the package
``expecttest``. Some also fail without the recorder.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

#: Runs the tests in forked ranks. Arguments: "record" or "stock", and the output file.
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
    recorder = Recorder(0)
    set_current(recorder)
    Flusher(recorder, lambda kind, what: None)

if record:
    import distkit.recording.tap
    os.register_at_fork(after_in_child=record_all)

class Outcomes(unittest.TestResult):
    found = {}
    def add(self, test, outcome):
        self.found[test._testMethodName] = outcome
    def addSuccess(self, test):
        self.add(test, "passed")
    def addSkip(self, test, reason):
        self.add(test, "skipped")
    def addFailure(self, test, error):
        self.add(test, "failed")
    addError = addFailure

names = [name for name in dir(Tests) if name.startswith("test_")]
unittest.TestSuite(map(Tests, names)).run(Outcomes())
json.dump(Outcomes.found, open(out, "w"))
"""


def outcomes(mode: str, folder: Path) -> dict[str, str]:
    folder.mkdir()
    (folder / "barrier").touch()
    environ = {"BACKEND": "gloo", "WORLD_SIZE": "2", "TEMP_DIR": str(folder)}
    environ |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    out = folder / "outcomes.json"
    subprocess.run(
        [sys.executable, "-c", TESTS, mode, str(out)],
        env={**os.environ, **environ},
        check=True,
        capture_output=True,
    )
    return dict(json.loads(out.read_text()))


@pytest.mark.timeout(3600)
def test_torch_tests_have_the_same_outcomes_when_recorded(tmp_path: Path) -> None:
    pytest.importorskip("expecttest")
    stock = outcomes("stock", tmp_path / "stock")
    assert list(stock.values()).count("passed") > 50
    assert outcomes("record", tmp_path / "record") == stock
