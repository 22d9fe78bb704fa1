"""Two processes killed at once: some cases of ``distkit bench kills``, which tries them all."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.kills import CASES, PARTS, Case, Kernels


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernels]:
    short = tmp_path_factory.getbasetemp() / "k"
    short.mkdir()
    with Kernels(str(short)) as kernels:
        yield kernels


@pytest.mark.parametrize(
    "case",
    [
        Case("zygote", "worker 0", "running", 0.01),
        Case("worker 1", "server 0", "stepping", 0.0),
        Case("kernel", "zygote", "running", 0.0),
    ],
    ids=str,
)
def test_two_are_killed(kernels: Kernels, case: Case) -> None:
    outcome = kernels.try_out(case)
    assert (outcome.processes, outcome.folders, outcome.segments) == ([], [], [])
    assert not outcome.hangs, outcome.told


def test_every_pair_is_a_case() -> None:
    assert len({*CASES}) == len(CASES) == len(PARTS) * (len(PARTS) - 1) // 2 * 3 * 2
