"""Benchmarks of distkit and, where they exist, of comparable programs in the same run.

A benchmark is a module with a table of figures and a function ``measure(reps, log)``. Contenders
alternate (A B A B), and their medians are compared. A benchmark does not fail on a slow machine:
each figure only reports whether it meets its limits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import import_module

from benchmarks.figure import Report, machine

#: The benchmarks, each with its default number of repetitions.
ALL = {
    "start": 5,
    "memory": 3,
    "tap": 10,
    "step": 100,
    "hang": 3,
    "views": 5,
    "allreduce": 7,
    "kvstore": 5,
    "train": 5,
    "simulate": 5,
    "published": 1,
    "course": 4,
    "hosts": 3,
    "gpu": 5,
    "house": 1,
}


def measure(
    names: Iterable[str], reps: int | None, log: Callable[[str], None], **options: str
) -> Report:
    """Run benchmarks one after the other and return their report.

    Args:
        names: names in :data:`ALL`.
        reps: number of repetitions; None for each benchmark's default.
        log: called with each line of progress.
        options: other arguments of the benchmarks.
    """
    report = Report(machine())
    for name in names:
        module = import_module(f"benchmarks.{name}")
        figures, details = module.measure(reps or ALL[name], log, **options)
        report.figures += figures
        report.details[name] = details
    return report
