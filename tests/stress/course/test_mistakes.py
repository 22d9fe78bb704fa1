"""Common mistakes in the exercises are rejected with their messages."""

from __future__ import annotations

import pytest

from distkit_course.exercises import TASKS
from tests.stress.course.mistakes import tolerated


@pytest.mark.parametrize("name", TASKS)
def test_each_common_mistake_is_rejected_with_its_message(name: str) -> None:
    assert tolerated(TASKS[name]) == []
