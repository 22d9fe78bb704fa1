"""Every program of the suite is explained."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.stress.bugs.suite import Case, cases, judge, themes, threads

#: Reads a buffer through an array made before, which no hook of torch sees.
NUMPY = "use_numpy_of_open_irecv"
UNSEEN = pytest.mark.xfail(strict=True, reason="no hook sees it: docs/decisions, 15")


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=UNSEEN if case.name == NUMPY else ())
        for case in [*cases(), *threads(), *themes()]
    ],
)
def test_program_is_explained_correctly(case: Case, tmp_path: Path) -> None:
    verdict = judge(case, tmp_path)
    assert verdict.wrong == [], verdict.shown
