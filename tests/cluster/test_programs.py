"""A sample of third-party style programs; ``make stress`` runs all.

One of each way to communicate: DDP hooks in an unseeded program, functional collectives under the
compiler, and messages between pipeline stages.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import distkit as dk
from tests.stress.programs.suite import Program, differs, faults


@pytest.fixture(scope="module")
def cluster() -> Iterator[dk.Cluster]:
    with dk.Cluster(2, threads=1) as cluster:
        yield cluster


@pytest.mark.parametrize("name", ["elastic_ddp", "functional", "pipeline_schedules"])
def test_program_behaves_as_under_torchrun(cluster: dk.Cluster, name: str) -> None:
    assert not [*filter(None, faults(name, cluster))]


def test_different_output_is_detected() -> None:
    seeded, unseeded = Program("all_reduce"), Program("all_reduce", seeded=False)
    one, other, third = ["loss 0.5", "end"], ["loss 0.25", "end"], ["loss -1.5e-3", "end"]
    assert not differs([one, ["a warning", *other]], [one, other], seeded)
    assert "rank 1 prints ['loss 0.5'" in differs([one, one], [one, other], seeded)
    assert "not ['loss 0.5', 'end']" in differs([one[:1], other], [one, other], seeded)
    assert not differs([one, other], [third, one], unseeded)
    assert differs([one, one], [one, other], unseeded) == "ranks print the same"
    assert differs([one, ["loss"]], [one, other], unseeded).startswith("rank 1 prints ['loss']")
