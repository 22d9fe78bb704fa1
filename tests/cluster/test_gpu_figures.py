"""The figures of ``distkit bench gpu``: measured on the CPU, missing without a GPU, or failed."""

from __future__ import annotations

import pytest

from benchmarks import gpu
from benchmarks.figure import Figure
from benchmarks.gpu import ROWS, Row, measure, measure_row


@pytest.mark.stand_in
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.figure.name)
def test_figure_can_be_measured_on_the_cpu(row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANKS": 2, "STEPS": 2, "SIZE": 1 << 20}.items():
        monkeypatch.setattr(gpu, name, value)
    figure = measure_row(row, 1, "cpu")
    assert (figure.note, figure.reps, figure.verdict) == ("", 1, "")
    assert "[stand-in: cpu]" in figure.name
    assert figure.value == 0 if row.figure.unit == "MiB" else figure.value > 0


def test_figure_without_a_gpu_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "gpus", lambda: 0)
    figures, details = measure(1, lambda _: None)
    assert {f.verdict for f in figures} == {"not measured: no GPU"}
    assert [f.name for f in figures] == [row.figure.name for row in ROWS]
    assert details["torch"] and "date" in details


def test_failed_measurement_reports_the_error() -> None:
    def fail(device: str, reps: int) -> None:
        raise ValueError(f"{reps} on {device}")

    figure = measure_row(Row(Figure("x", "s", reference="y", limit=1), fail), 3)
    assert figure.verdict == "failed: ValueError: 3 on cuda:0"
