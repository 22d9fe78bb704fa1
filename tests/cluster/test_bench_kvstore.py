"""The benchmark's own runs: a server that is killed."""

from __future__ import annotations

from benchmarks import kvstore_faults


def test_a_killed_server_costs_no_push() -> None:
    (end,) = kvstore_faults.servers_killed(1)
    assert end["wrong"] == 0
    assert end["pushes"] > 0
    assert end["pause"] > 0
