"""What an experiment is doing, as plain data and in words. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from distkit.views.scene.units import count


@dataclass(frozen=True)
class Activity:
    """What an experiment is doing: the n-th of its runs, since when, how far it has come."""

    ranks: int
    number: int = 1
    of: int = 1
    since: float = 0.0
    running: bool = False  # else its ranks are being started
    stopping: bool = False
    over: bool = False  # its trace is being read
    done: int | None = None
    total: int | None = None
    operations: int = 0


def words(activity: Activity) -> str:
    """What an experiment does, in a line without its seconds.

    >>> words(Activity(4, running=True, done=3, total=20))
    'step 3 of 20'
    """
    which = f"run {activity.number} of {activity.of} · " if activity.of > 1 else ""
    if activity.over:
        return f"{which}reading the trace"
    if activity.stopping:
        return f"{which}stopping"
    if not activity.running:
        return f"{which}starting {count(activity.ranks, 'rank')}"
    if activity.done is not None:
        end = f" of {activity.total:,}" if activity.total else ""
        return f"{which}step {activity.done:,}{end}"
    return f"{which}{count(activity.operations, 'operation')}"
