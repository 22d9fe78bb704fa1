"""Each program of the suite as a test; ``make stress`` runs them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.stress.bugs.suite import Case, cases, judge, themes, threads


@pytest.mark.parametrize("case", [*cases(), *threads(), *themes()], ids=lambda case: case.name)
def test_program_is_explained_rightly(case: Case, tmp_path: Path) -> None:
    verdict = judge(case, tmp_path)
    assert verdict.wrong == [], verdict.shown
