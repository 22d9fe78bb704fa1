"""The suites of correctness in tests/stress, as figures: how many of their tests fail."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import xml.etree.ElementTree as xml
from pathlib import Path
from typing import Any

from benchmarks.driver import Say
from benchmarks.figure import Figure, figure

ROOT = Path(__file__).parents[1]

#: What each suite tries, by its place in tests/stress.
SUITES = {
    "misuse": "harm that a run does to its process and to the next run",
    "test_kills.py": "pairs of a cluster's processes killed, idle, running and stepping",
    "test_random_programs.py": "random correct programs: false alarms",
    "bugs": "wrong and right programs: what is reported",
    "programs": "strangers' programs: recorded and stepped as under torchrun",
    "kvstore": "the parameter server: MXNet's semantics, schedules of faults",
}


def measure(reps: int, say: Say) -> tuple[list[Figure], dict[str, Any]]:
    """Every suite once; the same every time, so ``reps`` do not matter."""
    figures, details = [], {}
    for suite, what in SUITES.items():
        say(f"stress: {suite}")
        count, failed = _failed(suite)
        name = f"{what}, {count} tests that fail"
        figures.append(figure(name, "tests", [len(failed)], must=0, absolute=True))
        details[suite] = failed
    return figures, details


def _failed(suite: str) -> tuple[int, list[str]]:
    """The number of tests, and the names of those that fail."""
    with tempfile.TemporaryDirectory(prefix="distkit-bench-") as folder:
        result = Path(folder, "result.xml")
        command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={result}"]
        subprocess.run([*command, f"tests/stress/{suite}"], cwd=ROOT, stdout=subprocess.DEVNULL)
        cases = [*xml.parse(result).iter("testcase")]
    failed = [str(c.get("name")) for c in cases if {"failure", "error"} & {e.tag for e in c}]
    return len(cases), failed
