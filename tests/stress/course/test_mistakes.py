"""Common mistakes in the exercises are rejected with their messages."""

from __future__ import annotations

import pytest

from distkit_course.exercises import TASKS
from tests.stress.course.mistakes import tolerated


@pytest.mark.parametrize("name", TASKS)
def test_common_mistakes_are_rejected_with_their_message(name: str) -> None:
    assert tolerated(TASKS[name]) == []
