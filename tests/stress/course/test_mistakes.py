"""Each usual mistake in each exercise is rejected by its message."""

from __future__ import annotations

import pytest

from distkit_course.exercises import TASKS
from tests.stress.course.mistakes import tolerated


@pytest.mark.parametrize("name", TASKS)
def test_each_usual_mistake_is_rejected_by_its_message(name: str) -> None:
    assert tolerated(TASKS[name]) == []
