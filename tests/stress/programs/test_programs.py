"""Every program behaves as under torchrun; programs that need a missing package are skipped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache

import pytest

import distkit as dk
from tests.stress.programs.suite import ALL, SCRIPTS, faults


@pytest.fixture(scope="module")
def cluster() -> Iterator[Callable[[int], dk.Cluster]]:
    """A function that returns the cluster with a number of ranks."""
    with ExitStack() as stack:
        yield cache(lambda ranks: stack.enter_context(dk.Cluster(ranks, threads=1)))


@pytest.mark.parametrize("name", ALL)
def test_program_behaves_the_same_as_under_torchrun(
    cluster: Callable[[int], dk.Cluster], name: str
) -> None:
    pytest.importorskip(ALL[name].needs)
    assert not [*filter(None, faults(name, cluster(ALL[name].ranks)))]


def test_every_script_belongs_to_a_program() -> None:
    assert {name.partition(":")[0] for name in ALL} == {file.stem for file in SCRIPTS.glob("*.py")}
