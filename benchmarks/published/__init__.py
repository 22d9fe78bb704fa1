"""Published scaling tables compared with the cost model's predictions, without measurements.

tables.py contains the numbers and their sources. Some rows are marked as fitted, because they
determine the constants of a machine. The other rows are scored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.figure import Figure
from benchmarks.published import (
    collectives,
    jobs,
    parameter_servers,
    pipelines,
    rows,
    tables,
    training,
)
from benchmarks.published.rows import Row


def measure(reps: int, log: Callable[[str], None]) -> tuple[list[Figure], dict[str, Any]]:
    """Predict every row, and score the rows that were not fitted; ``reps`` has no effect."""
    predictions = {
        "collectives": collectives.rows(),
        "training": training.rows(),
        "parameter server": parameter_servers.rows(),
        "pipelines": pipelines.rows(),
        "jobs": jobs.rows(),
        "Megatron": jobs.megatron(),
        "memory": jobs.memory(),
    }
    for name, table in predictions.items():
        log(f"published: {name}")
        for row in table:
            log(f"    {_line(row)}")
    details: dict[str, Any] = {
        name: [row.to_dict() for row in table] for name, table in predictions.items()
    }
    details["not predicted"] = tables.NOT_PREDICTED
    interleaved = [row for row in predictions["pipelines"] if "1F1B's" in row.table]
    return [
        _figure(
            "all-reduce, geometric mean error", predictions["collectives"], rows.geomean, 15, 8
        ),
        _figure(
            "training throughput, median error", predictions["training"], rows.median_error, 10, 5
        ),
        _figure(
            "parameter server, median error",
            predictions["parameter server"],
            rows.median_error,
            15,
            10,
        ),
        _figure("pipelines, largest error", predictions["pipelines"], rows.largest_error, 3, 3),
        _figure(
            "interleaving from 1F1B's constant, largest error",
            interleaved,
            rows.largest_error,
            6,
            3,
        ),
        _figure("vTrain jobs, median error", predictions["jobs"], rows.median_error, 6, 4),
        _figure("vTrain jobs, largest error", predictions["jobs"], rows.largest_error, 30, 20),
        _figure("Megatron jobs, largest error", predictions["Megatron"], rows.largest_error, 8, 5),
        _figure("Megatron memory, largest error", predictions["memory"], rows.largest_error, 0, 0),
    ], details


def _figure(
    name: str, table: list[Row], error: Callable[[list[Row]], float], limit: float, target: float
) -> Figure:
    scored = rows.scored_rows(table)
    worst = rows.worst(table)
    title = (
        f"published {name}: {len(scored)} rows scored, {len(table) - len(scored)} fitted; "
        f"worst {worst.table}, {worst.case}"
    )
    errors = [100 * abs(row.error) for row in scored]
    naive = 100 * rows.naive_error(table) if any(row.naive for row in scored) else None
    return Figure(
        title,
        "%",
        100 * error(table),
        min(errors),
        max(errors),
        len(errors),
        "perfect scaling's" if naive else "",
        naive,
        limit,
        target,
        True,
    )


def _line(row: Row) -> str:
    """Format a row: prediction, published number, whether it was fitted, and error."""
    return (
        f"{row.table}, {row.case}: {row.predicted:.4g} for {row.published:.4g} {row.unit}, "
        f"{'fitted' if row.fitted else 'scored'}, {100 * row.error:+.1f}%"
    )
