"""Several machines: what is promised of them, in a laboratory of hosts made of namespaces.

Each part is one module with one function, ``measure(reps, say)``, as a benchmark has.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from benchmarks.figure import Figure

#: The parts, in the order in which they are measured.
PARTS = ("doctor", "life", "hierarchy", "lessons")


def measure(reps: int, say: Callable[[str], None]) -> tuple[list[Figure], dict[str, Any]]:
    """All parts, one after the other."""
    figures: list[Figure] = []
    details = {}
    for name in PARTS:
        part = import_module(f"benchmarks.hosts.{name}")
        found, details[name] = part.measure(reps, say)
        figures += found
    return figures, details
