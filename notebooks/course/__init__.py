"""Content of the course: exercises with solutions, questions, and concept checks."""

from __future__ import annotations

from distkit_course.content import (
    collectives,
    machines,
    messages,
    models,
    parameter_server,
    programs,
    training,
)
from distkit_course.task import Task

#: All exercises, by subject.
TASKS: list[Task] = [
    task
    for part in (messages, collectives, training, models, parameter_server, machines, programs)
    for task in part.TASKS
]
