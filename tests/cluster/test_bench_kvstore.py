"""The benchmark's own runs: a server that is killed, rows that are predicted."""

from __future__ import annotations

from benchmarks import kvstore_faults, serving


def test_a_killed_server_costs_no_push() -> None:
    (end,) = kvstore_faults.servers_killed(1)
    assert end["wrong"] == 0
    assert end["pushes"] > 0
    assert end["pause"] > 0


def test_rows_of_every_kind_are_predicted_and_measured() -> None:
    asked = [
        serving.Case(2, 1, "dist_sync", 1 << 12, 3),
        serving.Case(2, 1, "dist_async", 1 << 12, 3, "processor"),
        serving.Case(2, 1, "SSP, staleness 2", 1 << 12, 3, "device", 2.0),
    ]
    rows = serving.predicted(asked, 1, lambda line: None)
    assert [row["unit"] for row in rows] == ["s", "steps/s", "steps/s"]
    assert all(row["predicted"] > 0 and row["measured"] > 0 for row in rows)
