"""How tests wait until something is so, and hold something to a time on a busy machine."""

from __future__ import annotations

import time
from collections.abc import Callable


def until(condition: Callable[[], object], within: float = 60.0) -> None:
    """Wait until something is so, at most so many seconds."""
    deadline = time.monotonic() + within
    while not condition():
        assert time.monotonic() < deadline, f"not so within {within:g} s"
        time.sleep(0.005)


def quickly(act: Callable[[], object], within: float, tries: int = 5) -> None:
    """Do it until it takes less than so many seconds once: the machine may have other work."""
    for _ in range(tries):
        begun = time.monotonic()
        act()
        took = time.monotonic() - begun
        if took < within:
            return
    raise AssertionError(f"took {took:.2f} s, not less than {within:g} s")
