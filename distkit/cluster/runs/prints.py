"""Output of the ranks of a run: a line at a time, labelled, where somebody waits for it."""

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

#: A line of a rank's: rank, "stdout" or "stderr", text.
Text = tuple[int, str, str]

#: Of each rank's output so many characters are kept for ``run.output``.
KEPT = 10_000_000

#: Lines are printed so many at a time.
AT_ONCE = 1_000

#: A notebook's page gets this many rows at once, this many of one rank, and so many more a second …
BURST, SHARE, RATE = 1_000, 400, 5
#: … where a row has this many characters, and a line at most so many; and of what is left out the
#: last lines of each rank.
ROW, WIDTH, LAST = 80, 2_000, 3


class Prints:
    """Collects pieces, hands over lines."""

    def __init__(self) -> None:
        self._texts: queue.SimpleQueue[list[Text] | None] = queue.SimpleQueue()
        self._partial: dict[tuple[int, str], str] = {}
        self._kept: dict[int, list[str]] = defaultdict(list)
        self._room: dict[int, int] = defaultdict(lambda: KEPT)  # characters
        self._page = Page() if in_notebook() else None
        self._guard = threading.Lock()

    def add(self, rank: int, stream: str, text: str) -> None:
        """Something that a rank printed."""
        with self._guard:
            self._keep(rank, text)
        *lines, rest = (self._partial.pop((rank, stream), "") + text).split("\n")
        if rest:
            self._partial[rank, stream] = rest
        if lines:
            self._texts.put([(rank, stream, _last_state(line)) for line in lines])

    def _keep(self, rank: int, text: str) -> None:
        if (room := self._room[rank]) > 0:
            self._kept[rank].append(text[:room])
        self._room[rank] = room - len(text)

    def all_of(self, rank: int) -> str:
        """All that a rank printed, if it was not more than ten million characters."""
        with self._guard:
            text, more = "".join(self._kept[rank]), -self._room[rank]
        return f"{text}\n… {more:,} characters were not kept …\n" if more > 0 else text

    def end(self) -> None:
        """Nothing more will come."""
        for (rank, stream), rest in sorted(self._partial.items()):
            self._texts.put([(rank, stream, _last_state(rest))])
        self._texts.put(None)

    def take(self) -> Iterator[Text]:
        """The lines so far, each once."""
        with suppress(queue.Empty):
            while (lines := self._texts.get_nowait()) is not None:
                yield from lines

    def print_now(self) -> None:
        """Print the lines so far."""
        self._print(self.take())

    def print_until(self, over: Callable[[], bool], timeout: float | None) -> bool:
        """Print lines as they come, until the end; False when the time is up before."""
        end = None if timeout is None else time.monotonic() + timeout
        while not (over() and self._texts.empty()):
            left = 0.1 if end is None else min(0.1, end - time.monotonic())
            if left <= 0:
                return False
            first: list[Text] | None = None
            with suppress(queue.Empty):
                first = self._texts.get(timeout=left)
            self._print(itertools.chain(first or (), self.take()))
        if self._page is not None:
            _write(self._page.rest())
        return True

    def _print(self, lines: Iterator[Text]) -> None:
        _write(lines if self._page is None else self._page.admit(lines, time.monotonic()))


class Budget:
    """Rows that may still be shown: ``most`` at once, and ``RATE`` more a second."""

    def __init__(self, most: int) -> None:
        self.rows, self._most, self._at = float(most), most, 0.0

    def left(self, now: float) -> float:
        """The number left now."""
        since = now - self._at if self._at else 0.0
        self.rows, self._at = min(self._most, self.rows + RATE * since), now
        return self.rows


class Page:
    """The part of the ranks' output that a page gets; a flood would cripple it. Pure.

    At most ``BURST`` rows at once and ``RATE`` a second in the long run. What is left out is
    counted, and its last lines are shown when the run is over.
    """

    def __init__(self) -> None:
        self._all = Budget(BURST)
        self._each: dict[int, Budget] = defaultdict(lambda: Budget(SHARE))
        self._left_out: Counter[int] = Counter()
        self._last: dict[int, deque[Text]] = defaultdict(lambda: deque(maxlen=LAST))

    def admit(self, lines: Iterator[Text], now: float) -> Iterator[Text]:
        """Those that are shown."""
        for rank, stream, line in lines:
            line = _shortened(line)
            budgets = self._all, self._each[rank]
            if all(b.left(now) > 0 for b in budgets):
                for budget in budgets:
                    budget.rows -= 1 + len(line) // ROW
                self._last[rank].clear()
                yield rank, stream, line
            else:
                self._left_out[rank] += 1
                self._last[rank].append((rank, stream, line))

    def rest(self) -> Iterator[Text]:
        """A notice about the lines that were left out, and their last ones."""
        for rank, count in sorted(self._left_out.items()):
            last = self._last[rank]
            if (more := count - len(last)) > 0:
                yield rank, "stdout", f"… {more:,} lines are not shown: see run.output[{rank}] …"
            yield from last
        self._left_out.clear()
        self._last.clear()


def _last_state(line: str) -> str:
    """A line as a terminal shows it in the end: a progress bar writes over itself."""
    return line.rstrip("\r").rpartition("\r")[2]


def _shortened(line: str) -> str:
    more = len(line) - WIDTH
    return line if more <= 0 else f"{line[:WIDTH]} … {more:,} more characters"


def _write(lines: Iterator[Text]) -> None:
    while some := list(itertools.islice(lines, AT_ONCE)):
        for stream, together in itertools.groupby(some, lambda item: item[1]):
            text = "".join(f"[rank {rank}] {line}\n" for rank, _, line in together)
            print(text, end="", file=getattr(sys, stream), flush=True)
