"""tools/gpu-check without a GPU, and the page of measurements."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import subprocess
import sys
import xml.etree.ElementTree as xml
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from benchmarks.gpu import ROWS
from distkit.cluster import machine

TOOLS = Path(__file__).parents[2] / "tools"
TOOL = TOOLS / "gpu-check"


def module(name: str, path: Path) -> ModuleType:
    loader = importlib.machinery.SourceFileLoader(name, str(path))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(name, loader))
    sys.modules[name] = module
    loader.exec_module(module)
    return module


measured = module("gpu_report", TOOLS / "gpu_report.py")


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return module("gpu_check", TOOL)


# -- the page ----------------------------------------------------------------------------------


def test_measured_page_is_up_to_date() -> None:
    page = (measured.FOLDER / "README.md").read_text()
    assert page == measured.rendered(measured.reports()), "run tools/gpu-check --render"


def test_every_figure_and_marked_test_has_a_row() -> None:
    page = measured.rendered([])
    assert all(f"| {row.name} |" in page for row, _ in ROWS)
    assert f"| {measured.BEYOND[0]} | {measured.UNPROVEN} |" in page
    found = {test.name: test for test in measured.tests()}
    added = found["test_device_gradients_are_summed_before_the_push"]
    assert (added.file, added.stand_in) == ("tests/ranks/test_kvstore_nodes.py", True)
    assert f"| {added.words} | `{added.file}` | yes | {measured.UNPROVEN} |" in page


def test_newest_report_wins(tmp_path: Path) -> None:
    (row, _), test = ROWS[0], measured.tests()[0]
    figure = {"name": row.name, "value": 1.5, "unit": "s", "ratio": 0.4, "reached": "must"}
    case = {"file": test.file, "name": test.name}
    ours = {
        "date": "2026-02-01",
        "gpus": ["H200, 143771 MiB, 570.1"],
        "figures": [figure],
        "tests": [{**case, "result": "passed"}, {**case, "result": "failed"}],
    }
    other = measured.tests()[-1]
    before = {"file": other.file, "name": other.name, "result": "passed"}
    older = {**ours, "date": "2026-01-01", "gpus": ["T4"]}
    older["tests"] = [{**case, "result": "passed"}, before]
    stand_in = {**ours, "date": "2027-01-01", "stand_in": "cpu"}
    for number, report in enumerate([older, ours, stand_in]):
        (tmp_path / f"{number}.json").write_text(json.dumps(report))
    page = measured.rendered(measured.reports(tmp_path))
    assert "Measured 2026-02-01 on H200, 143771 MiB, 570.1" in page
    assert "| 1.5 s = 0.4×: must |" in page
    assert f"| {test.words} | `{test.file}` | {'yes' if test.stand_in else '–'} | failed |" in page
    assert f"| {other.words} | `{other.file}` |" in page and "| passed |" in page


# -- the tool ----------------------------------------------------------------------------------


@pytest.mark.skipif(bool(machine.gpus()["found"]), reason="there is a GPU")
def test_missing_driver_is_reported_and_nothing_runs(tmp_path: Path) -> None:
    command = [sys.executable, str(TOOL), "--out", str(tmp_path / "report")]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 2
    assert ran.stderr.startswith("gpu-check: no GPU: ") and "Nothing was run" in ran.stderr
    assert not (tmp_path / "report").exists()


GOOD = {"python": [3, 11], "torch": "2.9.1+cu128", "cuda": "12.8", "gpus": 1}


@pytest.mark.parametrize(
    ("change", "stand_in", "why"),
    [
        ({}, "", ""),
        ({"gpus": 0, "cuda": None}, "", "torch 2.9.1+cu128 is built without CUDA"),
        ({"gpus": 0}, "", "torch 2.9.1+cu128 sees no GPU"),
        ({"gpus": 0}, "cpu", ""),
        ({"torch": "2.5.1"}, "cpu", "torch 2.5.1 is older than 2.6"),
        ({"python": [3, 9]}, "", "older than Python 3.10"),
        ({"error": "Traceback …\nNo module named 'torch'"}, "", "No module named 'torch'"),
    ],
)
def test_unusable_python_is_explained(
    tool: ModuleType, change: dict[str, Any], stand_in: str, why: str
) -> None:
    assert tool.unfit({**GOOD, **change}, stand_in) == why


def test_report_has_text_and_exit_status(
    tool: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    text = """<x><testcase classname="tests.ranks.test_a" name="test_b[cuda:0]" time="1.5"/>
    <testcase classname="tests.ranks.test_a" name="test_c" time="0"><failure message="no"/>
    </testcase></x>"""
    good, bad = map(tool.case, xml.fromstring(text))
    assert (good["file"], good["name"], good["parameters"], good["result"]) == (
        "tests/ranks/test_a.py",
        "test_b",
        "cuda:0",
        "passed",
    )
    assert (bad["result"], bad["message"]) == ("failed", "no")
    report = {"missing": [], "figures": [{"value": 1.0}], "traces": ["one.trace"]}
    assert tool.told({**report, "tests": [good]}, Path("r")) == 0
    assert tool.told({**report, "tests": [good, bad]}, Path("r")) == 1
    assert tool.told({**report, "tests": [good], "figures": [{"value": None}]}, Path("r")) == 1
    assert "Tests: 1 of 2 passed" in capsys.readouterr().out


def test_report_keeps_each_part_if_the_next_fails(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = SimpleNamespace(
        render=False, stand_in="cpu", out=tmp_path, wheels=None, reps=1, k="no such test"
    )
    monkeypatch.setattr(tool, "arguments", lambda: arguments)
    monkeypatch.setattr(tool, "chosen", lambda _: (sys.executable, {"missing": []}))
    monkeypatch.setattr(tool, "run", lambda *words, **_: "")
    assert tool.main() == 1
    report = json.loads((tmp_path / "gpu-report.json").read_text())
    assert report == {
        "stand_in": "cpu",
        "missing": [],
        "tests": [],
        "figures": [],
        "traces": [],
    }
