"""tools/gpu-check without a GPU, and the page with its measurements."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from benchmarks.gpu import ROWS

TOOLS = Path(__file__).parents[2] / "tools"


def load_module(name: str, path: Path) -> ModuleType:
    loader = importlib.machinery.SourceFileLoader(name, str(path))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(name, loader))
    sys.modules[name] = module
    loader.exec_module(module)
    return module


measured = load_module("gpu_report", TOOLS / "gpu_report.py")


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return load_module("gpu_check", TOOLS / "gpu-check")


# -- the page ----------------------------------------------------------------------------------


def test_measured_page_is_up_to_date() -> None:
    page = (measured.FOLDER / "README.md").read_text()
    assert page == measured.render_text(measured.reports()), "run tools/gpu-check --render"


def test_every_figure_and_marked_test_has_a_row() -> None:
    page = measured.render_text([])
    assert all(f"| {row.name} |" in page for row, _ in ROWS)
    assert f"| {measured.NOT_COVERED[0]} | {measured.NOT_MEASURED} |" in page
    found = {test.name: test for test in measured.tests()}
    row_of_test = found["test_device_gradients_are_summed_before_the_push"]
    assert (row_of_test.file, row_of_test.runs_on_cpu) == (
        "tests/ranks/test_kvstore_nodes.py",
        True,
    )
    assert f"| {row_of_test.title} | `{row_of_test.file}` | yes | {measured.NOT_MEASURED} |" in page


# -- the tool ----------------------------------------------------------------------------------


USABLE = {"python": [3, 11], "torch": "2.9.1+cu128", "cuda": "12.8", "gpus": 1}


@pytest.mark.parametrize(
    ("change", "stand_in", "reason"),
    [
        ({}, "", ""),
        ({"gpus": 0, "cuda": None}, "", "torch 2.9.1+cu128 is built without CUDA"),
        ({"gpus": 0}, "", "torch 2.9.1+cu128 detects no GPU"),
        ({"gpus": 0}, "cpu", ""),
        ({"torch": "2.5.1"}, "cpu", "torch 2.5.1 is older than 2.6"),
        ({"python": [3, 9]}, "", "older than Python 3.10"),
        ({"error": "Traceback …\nNo module named 'torch'"}, "", "No module named 'torch'"),
    ],
)
def test_unusable_python_is_explained(
    tool: ModuleType, change: dict[str, Any], stand_in: str, reason: str
) -> None:
    assert tool.reason_against({**USABLE, **change}, stand_in) == reason
