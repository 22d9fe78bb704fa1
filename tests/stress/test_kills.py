"""Kills two processes of a cluster: each pair, in each state, with each delay."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.stress.kills import CASES, Case, Kernels


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernels]:
    short = tmp_path_factory.getbasetemp() / "k"  # the path of a socket has at most 107 characters
    short.mkdir()
    kernels = Kernels(str(short))
    yield kernels
    kernels.close()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_two_killed_processes_leave_nothing_and_a_new_cluster_starts(
    kernels: Kernels, case: Case
) -> None:
    assert kernels.faults(case) == []
