"""Prints the output of a run's ranks in labelled lines, in the thread that waits for the run."""

from __future__ import annotations

import itertools
import queue
import sys
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import suppress

from distkit.cluster.notebook import in_notebook

#: A line of output: rank, "stdout" or "stderr", text.
Text = tuple[int, str, str]

#: Maximum number of characters per rank for ``run.output``.
MAX_KEPT = 10_000_000

#: Number of lines per call of print.
BATCH = 1_000

#: Limits of a notebook's output: rows in a burst, in a burst of one rank, and per second.
BURST, SHARE, RATE = 1_000, 400, 5
#: Characters per row; maximum length of a line; number of omitted lines of a rank shown at the end.
ROW_WIDTH, MAX_WIDTH, LAST = 80, 2_000, 3


class Prints:
    """Buffer that collects pieces of output and prints complete lines."""

    def __init__(self) -> None:
        self._texts: queue.SimpleQueue[list[Text] | None] = queue.SimpleQueue()
        self._partial: dict[tuple[int, str], str] = {}
        self._output: dict[int, list[str]] = defaultdict(list)
        self._remaining: dict[int, int] = defaultdict(lambda: MAX_KEPT)  # characters
        self._limiter = OutputLimiter() if in_notebook() else None
        self._lock = threading.Lock()

    def add(self, rank: int, stream: str, text: str) -> None:
        """Add a piece of a rank's output."""
        with self._lock:
            self._keep(rank, text)
        *lines, partial = (self._partial.pop((rank, stream), "") + text).split("\n")
        if partial:
            self._partial[rank, stream] = partial
        if lines:
            self._texts.put([(rank, stream, _overwrite(line)) for line in lines])

    def _keep(self, rank: int, text: str) -> None:
        if (remaining := self._remaining[rank]) > 0:
            self._output[rank].append(text[:remaining])
        self._remaining[rank] = remaining - len(text)

    def all_of(self, rank: int) -> str:
        """Return a rank's output, up to ``MAX_KEPT`` characters."""
        with self._lock:
            text, excess = "".join(self._output[rank]), -self._remaining[rank]
        return f"{text}\n… {excess:,} characters were discarded …\n" if excess > 0 else text

    def end(self) -> None:
        """Mark the end of the output."""
        for (rank, stream), partial in sorted(self._partial.items()):
            self._texts.put([(rank, stream, _overwrite(partial))])
        self._texts.put(None)

    def take(self) -> Iterator[Text]:
        """Remove and yield the lines so far."""
        with suppress(queue.Empty):
            while (lines := self._texts.get_nowait()) is not None:
                yield from lines

    def print_now(self) -> None:
        """Print the lines so far."""
        self._print(self.take())

    def print_until(self, over: Callable[[], bool], timeout: float | None) -> bool:
        """Print lines as they arrive, until the end; return False after ``timeout`` seconds."""
        end = None if timeout is None else time.monotonic() + timeout
        while not (over() and self._texts.empty()):
            wait = 0.1 if end is None else min(0.1, end - time.monotonic())
            if wait <= 0:
                return False
            first: list[Text] | None = None
            with suppress(queue.Empty):
                first = self._texts.get(timeout=wait)
            self._print(itertools.chain(first or (), self.take()))
        if self._limiter is not None:
            _write(self._limiter.rest())
        return True

    def _print(self, lines: Iterator[Text]) -> None:
        _write(lines if self._limiter is None else self._limiter.admit(lines, time.monotonic()))


class Budget:
    """Token bucket of rows: ``capacity`` in a burst, and ``RATE`` more per second."""

    def __init__(self, capacity: int) -> None:
        self.rows, self._capacity, self._updated = float(capacity), capacity, 0.0

    def left(self, now: float) -> float:
        """Return the number of rows left now."""
        elapsed = now - self._updated if self._updated else 0.0
        self.rows, self._updated = min(self._capacity, self.rows + RATE * elapsed), now
        return self.rows


class OutputLimiter:
    """A limit of the ranks' output, since a flood makes a notebook unusable. Pure.

    It admits at most ``BURST`` rows in a burst, and ``RATE`` per second on average. Omitted lines
    are counted, and the last ones are shown at the end of the run.
    """

    def __init__(self) -> None:
        self._total = Budget(BURST)
        self._by_rank: dict[int, Budget] = defaultdict(lambda: Budget(SHARE))
        self._omitted: Counter[int] = Counter()
        self._last: dict[int, deque[Text]] = defaultdict(lambda: deque(maxlen=LAST))

    def admit(self, lines: Iterator[Text], now: float) -> Iterator[Text]:
        """Yield the lines to show."""
        for rank, stream, line in lines:
            line = _truncate(line)
            budgets = self._total, self._by_rank[rank]
            if all(b.left(now) > 0 for b in budgets):
                for budget in budgets:
                    budget.rows -= 1 + len(line) // ROW_WIDTH
                self._last[rank].clear()
                yield rank, stream, line
            else:
                self._omitted[rank] += 1
                self._last[rank].append((rank, stream, line))

    def rest(self) -> Iterator[Text]:
        """Yield a notice about the omitted lines, and the last ones."""
        for rank, count in sorted(self._omitted.items()):
            last = self._last[rank]
            if (hidden := count - len(last)) > 0:
                yield rank, "stdout", f"… {hidden:,} lines are not shown: see run.output[{rank}] …"
            yield from last
        self._omitted.clear()
        self._last.clear()


def _overwrite(line: str) -> str:
    """Return the final state of a line in a terminal: a progress bar overwrites itself."""
    return line.rstrip("\r").rpartition("\r")[2]


def _truncate(line: str) -> str:
    excess = len(line) - MAX_WIDTH
    return line if excess <= 0 else f"{line[:MAX_WIDTH]} … {excess:,} more characters"


def _write(lines: Iterator[Text]) -> None:
    while batch := list(itertools.islice(lines, BATCH)):
        for stream, group in itertools.groupby(batch, lambda item: item[1]):
            text = "".join(f"[rank {rank}] {line}\n" for rank, _, line in group)
            print(text, end="", file=getattr(sys, stream), flush=True)
