"""Every misuse of the catalog is reported, and the next run works."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.stress.misuse.catalog import ALL
from tests.stress.misuse.trial import Trial


@pytest.fixture(scope="module")
def trial() -> Iterator[Trial]:
    trial = Trial()
    yield trial
    trial.close()


@pytest.mark.parametrize("name", ALL)
def test_misuse_is_reported_and_next_run_works(trial: Trial, name: str) -> None:
    assert trial.faults(ALL[name]) == []
