"""Prints the output of the ranks in labeled lines, in the thread that waits for the run."""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable

from distkit.cluster.notebook import in_notebook

#: A line of output: rank, "stdout" or "stderr", text.
OutputLine = tuple[int, str, str]

#: Maximum number of characters per rank for ``run.output``.
MAX_KEPT = 10_000_000

#: Maximum number of lines of a rank in a notebook; too much output makes it unusable.
MAX_LINES = 1_000


class OutputBuffer:
    """Collects chunks of output, and prints complete lines."""

    def __init__(self) -> None:
        self._lines: list[OutputLine] = []
        self._partial: dict[tuple[int, str], str] = {}
        self._output: dict[int, list[str]] = defaultdict(list)
        self._length: Counter[int] = Counter()  # length of each rank's output
        self._printed: Counter[int] = Counter()  # number of each rank's lines
        self._max_lines = MAX_LINES if in_notebook() else float("inf")
        self._changed = threading.Condition()

    def add(self, rank: int, stream: str, text: str) -> None:
        """Add a chunk of a rank's output."""
        with self._changed:
            remaining = MAX_KEPT - self._length[rank]
            if remaining > 0:
                self._output[rank].append(text[:remaining])
            self._length[rank] += len(text)
            *lines, partial = (self._partial.pop((rank, stream), "") + text).split("\n")
            if partial:
                self._partial[rank, stream] = partial
            self._lines += [(rank, stream, _final(line)) for line in lines]
            self._changed.notify_all()

    def output_of(self, rank: int) -> str:
        """Return a rank's output, up to ``MAX_KEPT`` characters."""
        with self._changed:
            text, excess = "".join(self._output[rank]), self._length[rank] - MAX_KEPT
        return f"{text}\n… {excess:,} characters were discarded …\n" if excess > 0 else text

    def end(self) -> None:
        """Complete the lines at the end of the run."""
        with self._changed:
            for (rank, stream), partial in sorted(self._partial.items()):
                self._lines.append((rank, stream, _final(partial)))
            self._changed.notify_all()

    def pop_lines(self) -> list[OutputLine]:
        """Remove and return the complete lines."""
        with self._changed:
            lines, self._lines = self._lines, []
        return lines

    def print_now(self) -> None:
        """Print the complete lines; a notebook shows the first ``MAX_LINES`` of each rank."""
        shown = []
        for rank, stream, line in self.pop_lines():
            self._printed[rank] += 1
            if self._printed[rank] <= self._max_lines:
                shown.append((rank, stream, line))
            elif self._printed[rank] == self._max_lines + 1:
                shown.append((rank, stream, f"… more lines are in run.output[{rank}] …"))
        for stream, group in itertools.groupby(shown, lambda item: item[1]):
            text = "".join(f"[rank {rank}] {line}\n" for rank, _, line in group)
            print(text, end="", file=getattr(sys, stream), flush=True)

    def print_until(self, finished: Callable[[], bool], timeout: float | None) -> bool:
        """Print lines until ``finished()``; return False after ``timeout`` seconds."""
        end = float("inf") if timeout is None else time.monotonic() + timeout
        while self._lines or not finished():
            wait = min(0.1, end - time.monotonic())
            if wait <= 0:
                return False
            with self._changed:
                self._changed.wait_for(lambda: self._lines or finished(), wait)
            self.print_now()
        return True


def _final(line: str) -> str:
    """Return the text after the last carriage return, such as the last state of a progress bar."""
    return line.rstrip("\r").rpartition("\r")[2]
