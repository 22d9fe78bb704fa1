"""A bar for what a cell waits for."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")


def advance(steps: Sequence[T]) -> Iterator[T]:
    """Iterate over ``steps``; in a notebook a bar shows how many of them are done.

    >>> [*advance("abc")]
    ['a', 'b', 'c']
    """
    found = sys.modules.get("IPython")
    shell = found.get_ipython() if found is not None else None
    if not hasattr(shell, "kernel"):
        yield from steps
        return
    from IPython.display import ProgressBar

    bar = ProgressBar(len(steps))
    bar.display()
    for done, step in enumerate(steps, 1):
        yield step
        bar.progress = done
