"""Predictions of published tables: their errors, and the fitted rows."""

from __future__ import annotations

import json
from functools import cache
from itertools import chain

import pytest

from benchmarks import published as bench
from benchmarks.published import (
    collectives,
    jobs,
    parameter_servers,
    pipelines,
    rows,
    training,
)
from benchmarks.published.rows import Row


@cache
def published() -> dict[str, list[Row]]:
    return {
        "collectives": collectives.rows(),
        "training": training.rows(),
        "parameter_servers": parameter_servers.rows(),
        "pipelines": pipelines.rows(),
    }


def test_errors_of_predictions_are_within_bounds() -> None:
    assert rows.geomean(published()["collectives"]) < 0.08
    assert rows.median_error(published()["training"]) < 0.05
    assert abs(rows.worst(published()["training"]).error) < 0.12
    assert rows.median_error(published()["parameter_servers"]) < 0.10
    assert abs(rows.worst(published()["pipelines"]).error) < 0.03


@pytest.mark.stress
def test_jobs_are_fitted_on_21_of_109_runs() -> None:
    predicted = jobs.rows()
    assert len(rows.scored_rows(predicted)) == 88
    assert rows.median_error(predicted) < 0.045
    assert sum(abs(row.error) > 0.3 for row in rows.scored_rows(predicted)) <= 3
    assert rows.largest_error(jobs.megatron()) < 0.04
    assert rows.largest_error(jobs.memory()) == 0


def test_interleaving_follows_from_1f1b_and_message_costs() -> None:
    interleaved = [row for row in published()["pipelines"] if "1F1B's" in row.table]
    assert len(rows.scored_rows(interleaved)) == 5
    assert abs(rows.worst(interleaved).error) < 0.01
    assert all(0.04 < row.error < 0.08 for row in pipelines._interleaving("6.2B", 0.0, fitted=0))


def test_most_rows_are_not_fitted() -> None:
    all_rows = list(chain.from_iterable(published().values()))
    assert len(rows.scored_rows(all_rows)) > len(all_rows) / 2
    assert all(len(rows.scored_rows(table)) > 5 for table in published().values())


def test_fitted_rows_are_reproduced() -> None:
    for row in chain.from_iterable(published().values()):
        if row.fitted:
            assert row.error == pytest.approx(0, abs=1e-6), row


@pytest.mark.stress
def test_benchmark_prints_all_rows() -> None:
    lines: list[str] = []
    figures, details = bench.measure(1, lines.append)
    assert [f.verdict for f in figures] == ["target met"] * 5 + [
        "limit met",
        "not met",
        "target met",
        "target met",
    ]
    assert sum(", fitted" in line for line in lines) == sum(
        row["fitted"]
        for name in ("collectives", "training", "parameter server", "pipelines", "jobs")
        for row in details[name]
    )
    assert json.loads(json.dumps(details))["not predicted"]
