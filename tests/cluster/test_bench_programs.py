"""Some of ``distkit bench programs``: programs beside torchrun, and what counts as equal."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import distkit as dk
from benchmarks import programs
from benchmarks.programs import ALL, SCRIPTS, Program


@pytest.fixture(scope="module")
def cluster() -> Iterator[dk.Cluster]:
    with dk.Cluster(2, threads=1) as cluster:
        yield cluster


@pytest.mark.parametrize("name", ["elastic_ddp", "functional"])
def test_programs_behave_as_under_torchrun(cluster: dk.Cluster, name: str) -> None:
    outcome = programs.compare(name, cluster)
    assert not {what: why for what, why in outcome.wrong.items() if what != "straggler"}
    assert outcome.events > 0


def test_what_counts_as_equal() -> None:
    seeded, unseeded = Program("all_reduce"), Program("all_reduce", seeded=False)
    one, other, third = ["loss 0.5", "end"], ["loss 0.25", "end"], ["loss -1.5e-3", "end"]
    assert not programs._differs([one, other], [one, other], seeded)
    assert "rank 1 prints 'loss 0.5'" in programs._differs([one, one], [one, other], seeded)
    assert "prints 1 lines, not 2" in programs._differs([one[:1], other], [one, other], seeded)
    assert not programs._differs([one, other], [third, one], unseeded)
    assert programs._differs([one, one], [one, other], unseeded) == "ranks print the same"
    assert programs._differs([one, ["loss"]], [one, other], unseeded) == "ranks print other words"


def test_every_script_is_a_program() -> None:
    assert {name.partition(":")[0] for name in ALL} == {file.stem for file in SCRIPTS.glob("*.py")}
    assert len(ALL) >= 25
