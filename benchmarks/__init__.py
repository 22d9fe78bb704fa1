"""Measurements of distkit, with other programs beside it in the same run where there are some.

A benchmark is a module with a table of figures and a function ``measure(reps, say)``. Contenders
take turns (A B A B), medians are compared, and a slow machine fails nothing: a figure says which of
its limits it keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import import_module

from benchmarks.figure import Report, machine

#: The benchmarks, and how often each repeats its measurement by default.
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
    names: Iterable[str], reps: int | None, say: Callable[[str], None], **options: str
) -> Report:
    """Run benchmarks one after the other.

    Args:
        names: of :data:`ALL`.
        reps: repetitions, or each benchmark's own number when None.
        say: receives a line of progress at a time.
        options: arguments of these benchmarks alone.
    """
    report = Report(machine())
    for name in names:
        module = import_module(f"benchmarks.{name}")
        figures, details = module.measure(reps or ALL[name], say, **options)
        report.figures += figures
        report.details[name] = details
    return report
