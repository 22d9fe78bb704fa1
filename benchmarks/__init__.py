"""Measurements of distkit, each compared with other programs, in the same run on the same machine.

Each benchmark is one module with one function, ``measure(reps, say)``. Contenders take turns
(A B A B), medians are compared, and a slow machine fails nothing: a figure says what it reached.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import import_module

from benchmarks.figure import Report, machine

#: The benchmarks, and how often each repeats its measurement by default.
ALL = {
    "start": 5,
    "memory": 3,
    "tap": 40,
    "orphans": 20,
    "step": 100,
    "hang": 3,
    "views": 5,
    "allreduce": 7,
    "kvstore": 5,
    "simulate": 5,
    "train": 5,
    "published": 1,
    "gpu": 5,
    "hosts": 1,
    "house": 1,
    "abuse": 1,
    "programs": 1,
    "upstream": 1,
    "kills": 126,
    "course": 30,
}


def knows(name: str) -> bool:
    """True if there is such a benchmark, or such a part of one."""
    whole, dot, part = name.partition(".")
    if whole not in ALL or not dot:
        return whole in ALL
    return part in getattr(import_module(f"benchmarks.{whole}"), "PARTS", ())


def measure(
    names: Iterable[str], reps: int | None, say: Callable[[str], None], **options: str
) -> Report:
    """Run benchmarks one after the other.

    Args:
        names: of :data:`ALL`, or a part of one: ``"course.memory"``.
        reps: repetitions, or each benchmark's own number when None.
        say: told what is going on, a line at a time.
        options: arguments of these benchmarks alone.
    """
    report = Report(machine())
    for name in names:
        module = import_module(f"benchmarks.{name}")
        figures, details = module.measure(reps or ALL[name.partition(".")[0]], say, **options)
        report.figures += figures
        report.details[name] = details
    return report
