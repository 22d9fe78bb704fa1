"""The course: its lessons, its exercises, and the classes that use both.

Each part is one module with one function, ``measure(reps, say)``, as a benchmark has;
``distkit bench course.memory`` measures one alone. Repetitions are students of a class.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from benchmarks.figure import Figure

#: The parts, in the order in which they are measured.
PARTS = ("lessons", "memory", "opening", "users", "answers", "classroom")


def measure(reps: int, say: Callable[[str], None]) -> tuple[list[Figure], dict[str, Any]]:
    """All parts, one after the other."""
    figures: list[Figure] = []
    details = {}
    for name in PARTS:
        found, details[name] = import_module(f"{__name__}.{name}").measure(reps, say)
        figures += found
    return figures, details
