"""Thirty submissions; three of them contain hostile answers, which cover all kinds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.stress.course.classroom import classroom


@pytest.mark.timeout(7200)
def test_hostile_submissions_do_not_affect_others_and_leave_no_process(
    tmp_path: Path, leftovers: Callable[[], list[str]]
) -> None:
    assert classroom(tmp_path, 30, print) == ([], 0)
    assert not leftovers()
