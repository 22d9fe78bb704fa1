"""Holds a rank of a stepped run before each of its communication calls."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Gate:
    """Holds a rank before each of its communications until it is let go.

    It stands in the tap's hook, so that every program passes it, DDP's C++ reducer included. The
    word to go on comes from another thread: the rank's main thread is the one that waits here.
    What the others see of a waiting rank is an operation that is *scheduled* and not *started*;
    :class:`distkit.diagnosis.rank_state.WaitForGraph` is the rule that makes sense of that.

    ``arrived`` is called when a communication has to wait here.
    """

    def __init__(self) -> None:
        self.arrived: Callable[[], None] = lambda: None
        self._permits: float = 0
        self._changed = threading.Condition()

    def allow(self, count: int | None) -> None:
        """Let ``count`` more through, or all there will be when None. From any thread."""
        with self._changed:
            self._permits += float("inf") if count is None else count
            self._changed.notify_all()

    def wait(self) -> None:
        """Wait for a permit and use it up."""
        with self._changed:
            if not self._permits:
                self.arrived()
                self._changed.wait_for(lambda: self._permits)
            self._permits -= 1
