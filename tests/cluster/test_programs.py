"""Two typical programs, with DDP and functional collectives; ``make stress`` runs many more."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import distkit as dk
from tests.stress.programs.suite import Program, faults, output_difference


@pytest.fixture(scope="module")
def cluster() -> Iterator[dk.Cluster]:
    with dk.Cluster(2, threads=1) as cluster:
        yield cluster


@pytest.mark.parametrize("name", ["elastic_ddp", "functional"])
def test_program_behaves_the_same_as_under_torchrun(cluster: dk.Cluster, name: str) -> None:
    assert not [*filter(None, faults(name, cluster))]


def test_difference_in_output_is_reported() -> None:
    seeded, unseeded = Program("all_reduce"), Program("all_reduce", seeded=False)
    first, second, third = ["loss 0.5", "end"], ["loss 0.25", "end"], ["loss -1.5e-3", "end"]
    assert not output_difference([first, ["a warning", *second]], [first, second], seeded)
    assert "rank 1 prints ['loss 0.5'" in output_difference([first, first], [first, second], seeded)
    assert "not ['loss 0.5', 'end']" in output_difference(
        [first[:1], second], [first, second], seeded
    )
    assert not output_difference([first, second], [third, first], unseeded)
    assert (
        output_difference([first, first], [first, second], unseeded)
        == "all ranks print the same output"
    )
    assert output_difference([first, ["loss"]], [first, second], unseeded).startswith(
        "rank 1 prints ['loss']"
    )
