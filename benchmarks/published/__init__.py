"""Published scaling tables beside the cost model's predictions. Nothing is measured here.

tables.py holds the numbers with their sources; the other modules predict one kind of table each.
Some rows of a table determine the constants of its machine; they are marked and never scored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.figure import Figure
from benchmarks.published import collectives, parameter_servers, pipelines, rows, tables, training
from benchmarks.published.rows import Row


def measure(reps: int, log: Callable[[str], None]) -> tuple[list[Figure], dict[str, Any]]:
    """Predict every row, and score the rows that determine no constant; ``reps`` is ignored."""
    found = {
        "collectives": collectives.rows(),
        "training": training.rows(),
        "parameter server": parameter_servers.rows(),
        "pipelines": pipelines.rows(),
    }
    for name, table in found.items():
        log(f"published: {name}")
        for row in table:
            log(f"    {_line(row)}")
    details: dict[str, Any] = {
        name: [row.to_dict() for row in table] for name, table in found.items()
    }
    details["not predicted"] = tables.NOT_PREDICTED
    return [
        _figure(
            "all-reduce, geometric mean error",
            found["collectives"],
            rows.geomean(found["collectives"]),
            15,
            8,
        ),
        _figure(
            "training throughput, median error",
            found["training"],
            rows.median_error(found["training"]),
            10,
            5,
        ),
        _figure(
            "parameter server, median error",
            found["parameter server"],
            rows.median_error(found["parameter server"]),
            15,
            10,
        ),
        _figure(
            "pipelines, largest error",
            found["pipelines"],
            abs(rows.worst(found["pipelines"]).error),
            3,
            3,
        ),
        _figure(
            "interleaving from 1F1B's constant, largest error",
            interleaved := [row for row in found["pipelines"] if "1F1B's" in row.table],
            abs(rows.worst(interleaved).error),
            6,
            3,
        ),
    ], details


def _figure(name: str, table: list[Row], error: float, must: float, aim: float) -> Figure:
    scored = rows.scored(table)
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
        100 * error,
        min(errors),
        max(errors),
        len(errors),
        "perfect scaling's" if naive else "",
        naive,
        must,
        aim,
        True,
    )


def _line(row: Row) -> str:
    """A row as text: prediction, published number, error."""
    error = "fitted" if row.fitted else f"{100 * row.error:+.1f} %"
    return (
        f"{row.table}, {row.case}: {row.predicted:.4g} for {row.published:.4g} {row.unit}, {error}"
    )
