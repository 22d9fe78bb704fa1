"""Writes docs/measured/README.md: tests and measurements with their results on GPUs.

The rows are the figures of :mod:`benchmarks.gpu` and the tests marked ``gpu`` in the sources. Each
row shows the newest result from the reports in the folder.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.figure import Figure  # noqa: E402
from benchmarks.gpu import ROWS  # noqa: E402

FOLDER = ROOT / "docs" / "measured"
NOT_MEASURED = "not measured"

#: Results of tests, worst first.
_WORST_FIRST = ["failed", "skipped", "passed"]

#: Features without a test or measurement.
NOT_COVERED = (
    "the settings of docs/gpus.md: Docker, JupyterHub, Kubernetes, time-slicing",
    "several GPUs: NCCL between ranks",
)

_HEAD = """# Measured on GPUs

`tools/gpu-check --render` writes this page from the tests and measurements that need a GPU and from
the reports in this folder. Each row shows the newest result. Do not edit this page, because a test
compares it with its sources.

`make test-gpu` runs these tests and measurements on a machine with an NVIDIA GPU, and writes
`gpu-report.json` and traces to the folder `gpu-report`. It calls `tools/gpu-check`, which needs
only the driver and a Python with torch for CUDA. To publish a report, copy it and its traces into
this folder, name it after the GPU and the date, and run `tools/gpu-check --render`.

Each measurement has a limit that it must meet. Some also have a stricter limit, the target. Each
result states the strictest limit that it meets, or that it meets none.
"""


class Test(NamedTuple):
    """A test for GPUs: its file, its name, and whether it also runs on the CPU."""

    file: str
    name: str
    runs_on_cpu: bool

    @property
    def title(self) -> str:
        """The test's name, with spaces."""
        return self.name.removeprefix("test_").replace("_", " ")


@cache
def tests() -> list[Test]:
    """Return the tests marked ``gpu`` in the sources."""
    files = sorted((ROOT / "tests").glob("*/test_*.py"))
    return [test for file in files for test in _gpu_tests_in(file)]


def _gpu_tests_in(file: Path) -> Iterator[Test]:
    """Yield the file's tests that a decorator, ``pytestmark`` or a parameter marks with ``gpu``."""
    tree = ast.parse(file.read_text())
    values = {
        ast.unparse(node.targets[0]): ast.unparse(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign)
    }
    choices = {name for name, value in values.items() if "param" in value and "mark.gpu" in value}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            marks = {ast.unparse(mark) for mark in node.decorator_list}
            runs_on_cpu = bool(marks & {"on_devices", *choices})
            if runs_on_cpu or "mark.gpu" in " ".join([*marks, values.get("pytestmark", "")]):
                yield Test(file.relative_to(ROOT).as_posix(), node.name, runs_on_cpu)


def reports(folder: Path = FOLDER) -> list[dict[str, Any]]:
    """Return the GPU reports in the folder, oldest first."""
    loaded = (json.loads(file.read_text()) for file in folder.glob("*.json"))
    return sorted((r for r in loaded if not r.get("stand_in")), key=lambda r: str(r.get("date")))


def render_text(reports: list[dict[str, Any]]) -> str:
    """Return the text of the README, with the newest result of each row."""
    figures = {f["name"]: f for report in reports for f in report.get("figures", [])}
    results: dict[tuple[str, str], str] = {}
    for report in reports:
        worst: dict[tuple[str, str], str] = {}  # the worst result of a parametrized test
        for test in report.get("tests", []):
            key = test["file"], test["name"]
            worst[key] = min(worst.get(key, test["result"]), test["result"], key=_WORST_FIRST.index)
        results |= worst
    sources = "\n".join(map(_source, reports)) or "No reports yet: no row was measured."
    figure_rows = (
        (row.name, row.reference or "–", _limits(row), _figure(figures.get(row.name)))
        for row, _ in ROWS
    )
    test_rows = (
        (
            test.title,
            f"`{test.file}`",
            "yes" if test.runs_on_cpu else "–",
            results.get(test[:2], NOT_MEASURED),
        )
        for test in tests()
    )
    return "\n".join(
        [
            _HEAD,
            sources,
            "\n## Measurements (`distkit bench gpu`)\n",
            *_table(("measurement", "reference, same run", "limits", "result"), figure_rows),
            "\n## Tests (`pytest -m gpu`)\n",
            *_table(("test", "file", "runs on the CPU", "on a GPU"), test_rows),
            "\n## Not covered\n",
            *_table(("feature", "on a GPU"), ((name, NOT_MEASURED) for name in NOT_COVERED)),
            "",
        ]
    )


def _source(report: dict[str, Any]) -> str:
    versions = [f"{k} {report[k]}" for k in ("torch", "cuda", "nccl") if k in report]
    machine = ["; ".join(report.get("gpus", [])), *versions]
    return f"- Measured {report.get('date')} on {', '.join(machine)}."


def _limits(row: Figure) -> str:
    sign = f" {row.unit}" if row.absolute else "×"
    limits = {"limit": row.limit, "target": row.target}
    return ", ".join(f"{w} ≤ {limit}{sign}" for w, limit in limits.items() if limit is not None)


def _figure(figure: dict[str, Any] | None) -> str:
    if not figure or figure["value"] is None:
        return figure["note"] if figure else NOT_MEASURED
    value, unit, ratio = figure["value"], figure["unit"], figure["ratio"]
    factors = "" if ratio is None else f" = {ratio:.3g} × {figure['reference_value']:.3g} {unit}"
    return f"{value:.3g} {unit}{factors}: {figure['verdict']}"


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    lines = [[*head], *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return [f"| {' | '.join(line)} |" for line in lines]


def render() -> Path:
    """Write the README and return its path."""
    FOLDER.mkdir(exist_ok=True)
    page = FOLDER / "README.md"
    page.write_text(render_text(reports()))
    return page
