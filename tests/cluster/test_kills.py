"""Kills pairs of a cluster's processes; ``make stress`` kills all pairs in all states.

The cases differ in what must detect the deaths: the kernel, the servers or the kernel's children.
"""

from __future__ import annotations

import pytest

from tests.stress.kills import Case, Kernels
from tests.stress.test_kills import kernels as kernels


@pytest.mark.parametrize(
    "case",
    [
        Case("fork server", "worker 0", "running", 0.01),
        Case("worker 1", "server 0", "stepping", 0.0),
        Case("kernel", "fork server", "running", 0.0),
        Case("controller", "worker 1", "running a cell", 0.01),
    ],
    ids=str,
)
def test_two_killed_processes_leave_nothing_and_a_new_cluster_starts(
    kernels: Kernels, case: Case
) -> None:
    assert kernels.faults(case) == []
