"""What the ranks of a run print: a line at a time, labelled, where somebody waits for the run."""

from __future__ import annotations

import queue
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

#: A line of a rank's: rank, "stdout" or "stderr", text.
Text = tuple[int, str, str]


class Prints:
    """Collects pieces, hands over lines."""

    def __init__(self) -> None:
        self._texts: queue.SimpleQueue[Text | None] = queue.SimpleQueue()
        self._partial: dict[tuple[int, str], str] = {}

    def add(self, rank: int, stream: str, text: str) -> None:
        """Something that a rank printed."""
        *lines, rest = (self._partial.pop((rank, stream), "") + text).split("\n")
        if rest:
            self._partial[rank, stream] = rest
        for line in lines:
            self._texts.put((rank, stream, line))

    def end(self) -> None:
        """Nothing more will come."""
        for (rank, stream), rest in sorted(self._partial.items()):
            self._texts.put((rank, stream, rest))
        self._texts.put(None)

    def take(self) -> Iterator[Text]:
        """The lines so far, each once."""
        with suppress(queue.Empty):
            while (item := self._texts.get_nowait()) is not None:
                yield item

    def print_now(self) -> None:
        """Print the lines so far."""
        for item in self.take():
            _print(item)

    def print_until(self, over: Callable[[], bool], timeout: float | None) -> bool:
        """Print lines as they come, until the end; False when the time is up before."""
        end = None if timeout is None else time.monotonic() + timeout
        while not (over() and self._texts.empty()):
            left = 0.1 if end is None else min(0.1, end - time.monotonic())
            if left <= 0:
                return False
            with suppress(queue.Empty):
                item = self._texts.get(timeout=left)
                if item is not None:
                    _print(item)
        return True


def _print(item: Text) -> None:
    rank, stream, line = item
    print(f"[rank {rank}] {line}", file=getattr(sys, stream), flush=True)
