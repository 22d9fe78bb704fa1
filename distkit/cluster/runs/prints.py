"""Output of a run's ranks: printed in labelled lines by the caller that waits for the run."""

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

#: Maximum number of characters per rank kept for ``run.output``.
MAX_KEPT = 10_000_000

#: Number of lines per call of print.
BATCH = 1_000

#: Limits of a notebook's output: rows at once, rows at once of a rank, further rows per second.
BURST, SHARE, RATE = 1_000, 400, 5
#: Characters per row; maximum length of a line; number of omitted lines of a rank shown at the end.
ROW_WIDTH, MAX_WIDTH, LAST = 80, 2_000, 3


class Prints:
    """Collects pieces of output, prints lines."""

    def __init__(self) -> None:
        self._texts: queue.SimpleQueue[list[Text] | None] = queue.SimpleQueue()
        self._partial: dict[tuple[int, str], str] = {}
        self._kept: dict[int, list[str]] = defaultdict(list)
        self._remaining: dict[int, int] = defaultdict(lambda: MAX_KEPT)  # characters
        self._page = OutputLimiter() if in_notebook() else None
        self._lock = threading.Lock()

    def add(self, rank: int, stream: str, text: str) -> None:
        """Add a piece of a rank's output."""
        with self._lock:
            self._keep(rank, text)
        *lines, rest = (self._partial.pop((rank, stream), "") + text).split("\n")
        if rest:
            self._partial[rank, stream] = rest
        if lines:
            self._texts.put([(rank, stream, _overwrite(line)) for line in lines])

    def _keep(self, rank: int, text: str) -> None:
        if (remaining := self._remaining[rank]) > 0:
            self._kept[rank].append(text[:remaining])
        self._remaining[rank] = remaining - len(text)

    def all_of(self, rank: int) -> str:
        """Return a rank's output, up to ``MAX_KEPT`` characters."""
        with self._lock:
            text, more = "".join(self._kept[rank]), -self._remaining[rank]
        return f"{text}\n… {more:,} characters were not kept …\n" if more > 0 else text

    def end(self) -> None:
        """Mark the end of the output."""
        for (rank, stream), rest in sorted(self._partial.items()):
            self._texts.put([(rank, stream, _overwrite(rest))])
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
        if self._page is not None:
            _write(self._page.rest())
        return True

    def _print(self, lines: Iterator[Text]) -> None:
        _write(lines if self._page is None else self._page.admit(lines, time.monotonic()))


class Budget:
    """Token bucket of rows that may be shown: ``capacity`` at once, and ``RATE`` more a second."""

    def __init__(self, capacity: int) -> None:
        self.rows, self._capacity, self._at = float(capacity), capacity, 0.0

    def left(self, now: float) -> float:
        """Return the number of rows left now."""
        since = now - self._at if self._at else 0.0
        self.rows, self._at = min(self._capacity, self.rows + RATE * since), now
        return self.rows


class OutputLimiter:
    """Limits the ranks' output in a notebook, which a flood would make unusable. Pure.

    It admits at most ``BURST`` rows at once and ``RATE`` a second in the long run. Omitted lines
    are counted, and the last ones are shown when the run is over.
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
            if (more := count - len(last)) > 0:
                yield rank, "stdout", f"… {more:,} lines are not shown: see run.output[{rank}] …"
            yield from last
        self._omitted.clear()
        self._last.clear()


def _overwrite(line: str) -> str:
    """Return a line as a terminal shows it finally: a progress bar overwrites itself."""
    return line.rstrip("\r").rpartition("\r")[2]


def _truncate(line: str) -> str:
    more = len(line) - MAX_WIDTH
    return line if more <= 0 else f"{line[:MAX_WIDTH]} … {more:,} more characters"


def _write(lines: Iterator[Text]) -> None:
    while batch := list(itertools.islice(lines, BATCH)):
        for stream, group in itertools.groupby(batch, lambda item: item[1]):
            text = "".join(f"[rank {rank}] {line}\n" for rank, _, line in group)
            print(text, end="", file=getattr(sys, stream), flush=True)
