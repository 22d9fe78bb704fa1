"""Which worker runs which scheduled function, and which run again: messages in, no I/O.

::

    worker w, life l:  ready ──────► its earlier life's function, if it ran one, is pending again
                       finished f ─► f is over, whoever ran it; its other runs do not count
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple


class Worker(NamedTuple):
    """A worker's process: its rank, and how many had its place before."""

    rank: int
    life: int


class FunctionQueue:
    """Functions by number, in the order of their scheduling.

    >>> queue = FunctionQueue()
    >>> queue.schedule(), queue.schedule()
    (0, 1)
    >>> queue.ready(Worker(1, 0)); queue.assign()
    [(Worker(rank=1, life=0), 0)]
    >>> queue.ready(Worker(1, 1)); queue.assign()        # worker 1 has died: again
    [(Worker(rank=1, life=1), 0)]
    >>> queue.finished(Worker(1, 1), 0), queue.assign()
    (True, [(Worker(rank=1, life=1), 1)])
    """

    def __init__(self) -> None:
        self.pending: deque[int] = deque()
        self.running: dict[Worker, int] = {}
        self._idle: dict[Worker, None] = {}  # in the order in which they became so
        self._lives: dict[int, int] = {}
        self._next = 0

    @property
    def unfinished(self) -> set[int]:
        """Those that are pending or running."""
        return {*self.pending, *self.running.values()}

    @property
    def floor(self) -> int:
        """All functions with a lower number are over."""
        return min(self.unfinished, default=self._next)

    def schedule(self) -> int:
        """A new function's number."""
        self.pending.append(self._next)
        self._next += 1
        return self._next - 1

    def ready(self, worker: Worker) -> None:
        """A worker asks for a function: what an earlier life of it was running runs again."""
        known = self._lives.setdefault(worker.rank, worker.life)
        if worker.life < known:
            return
        if worker.life > known:
            self._lives[worker.rank] = worker.life
            self._bury(Worker(worker.rank, known))
        if worker not in self.running:
            self._idle.setdefault(worker)

    def _bury(self, dead: Worker) -> None:
        self._idle.pop(dead, None)
        lost = self.running.pop(dead, None)
        if lost is not None:
            self.pending.appendleft(lost)

    def finished(self, worker: Worker, function: int) -> bool:
        """A worker has run a function: True if that is news, and its result counts."""
        news = function in self.unfinished
        if function in self.pending:  # its worker was taken for dead
            self.pending.remove(function)
        self.running = {w: f for w, f in self.running.items() if f != function}
        self.ready(worker)
        return news

    def assign(self) -> list[tuple[Worker, int]]:
        """Hand pending functions to idle workers."""
        made = list(zip(self._idle, self.pending, strict=False))
        for worker, function in made:
            del self._idle[worker]
            self.pending.popleft()
            self.running[worker] = function
        return made

    def cancel(self) -> list[int]:
        """Forget those that nobody runs yet."""
        cancelled = list(self.pending)
        self.pending.clear()
        return cancelled
