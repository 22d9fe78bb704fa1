"""States of the ranks of a stepped run: letting them go, waiting until none moves.

The rule is :class:`distkit.diagnosis.rank_state.WaitForGraph`, which is pure; here are the
threads and the time.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from distkit.cluster.runs import report
from distkit.cluster.runs.conductor import Conductor
from distkit.diagnosis.rank_state import Doing, RankState, WaitForGraph
from distkit.events import Event

#: A rank that is blocked may be freed by a message under way: so long nothing must happen [s].
QUIET = 0.01

#: How long a deadlock may take to be explained [s].
EXPLAINED = 3.0

#: Lets ranks through their gates so many times, or for good when None.
Go = Callable[[Iterable[int], "int | None"], None]


@dataclass(frozen=True, slots=True)
class Moment:
    """The program between two steps.

    ``choice`` are the ranks that were let go to come here, none at the beginning and after
    ``finish()``; ``standings`` say where each rank is. The first ``events`` events of the trace
    had happened; ``time`` is the trace's time [s].
    """

    events: int
    time: float
    choice: tuple[int, ...]
    standings: tuple[RankState, ...]


class Lockstep:
    """The ranks of a stepped run, and the moments that they have been through.

    Args:
        run: that has just been submitted; its times leave the pauses out from now on.
        go: lets ranks through their gates.
        collect: has servers hand over what they have recorded.
        changed: called, from any thread, when there is a new moment, or the run has ended.
    """

    def __init__(
        self, run: Conductor, go: Go, collect: Callable[[], None], changed: Callable[[], None]
    ) -> None:
        self.run, self._go, self._collect, self._changed = run, go, collect, changed
        self.moments: list[Moment] = []
        self._board = WaitForGraph(len(run.ranks))
        self._heard: Counter[int] = Counter()  # events of each rank
        self._told: dict[int, int] = {}  # how many those were when it was let go
        #: When each pause began, and how long all pauses were before it and with it [s].
        self._pauses: list[tuple[float, float, float]] = []
        self._last = 0.0  # time of the latest event, without the pauses
        self._stands = False  # nobody moves now …
        self._disturbed = False  # … but somebody has ended since
        self._free = set[int]()  # those let go for good
        self._replaced = 0  # so many of the run's are known here
        run.live.clock, run.on_end = self._clock, self._on_end
        run.subscribe(self._on_events)

    # -- looking --------------------------------------------------------------------

    @property
    def standings(self) -> list[RankState]:
        """The state of every rank."""
        return self._board.standings

    @property
    def paused(self) -> list[RankState]:
        """The ranks that can be let go."""
        return [s for s in self.standings if s.doing is Doing.PAUSED]

    @property
    def deadlocked(self) -> bool:
        """True if some are blocked, and nobody is there who could free them."""
        doing = {s.doing for s in self.standings}
        return Doing.BLOCKED in doing and not doing & {Doing.PAUSED, Doing.RUNNING}

    # -- moving ---------------------------------------------------------------------

    def let_go(self, ranks: Iterable[int], count: int | None = 1) -> None:
        """Open the gates of some ranks, ``count`` times or for good; the pause is over."""
        ranks = list(ranks)
        with self.run.changed:
            if self._stands:
                before = self._paused_so_far
                begin = self._last + before
                self._pauses.append((begin, before, before + time.monotonic() - begin))
            self._stands = self._disturbed = False
            self._told = {r: self._heard[r] for r in ranks}
            self._free.update(ranks if count is None else ())
        self._go(ranks, count)

    def settle(self, choice: tuple[int, ...] = ()) -> None:
        """Wait until nobody moves by itself, and make that the present moment."""
        changed = self.run.changed
        with changed:
            while True:
                changed.wait_for(self._settled)
                blocked = any(s.doing is Doing.BLOCKED for s in self.standings)
                if not blocked or not changed.wait_for(lambda: not self._settled(), QUIET):
                    break
        if self._ending():
            self.run.done.wait(EXPLAINED)
        if not self.run.finished:
            self._collect()  # what they did belongs to this moment
        self.note(choice)

    def note(self, choice: tuple[int, ...]) -> None:
        """Make the present a moment to come back to."""
        with self.run.changed:
            self._note_ends()
            self.moments.append(self._now(choice))
            self._stands = self.moments[-1].events > 0
        self._changed()

    def _now(self, choice: tuple[int, ...]) -> Moment:
        return Moment(self._heard.total(), self._last, choice, tuple(self.standings))

    def _settled(self) -> bool:
        """True if nothing will happen by itself. Called with the lock held."""
        self._note_ends()
        if any(self._heard[r] == n and r in self.run.waiting for r, n in self._told.items()):
            return self.run.finished  # the word to go is still on its way
        return self._board.settled or self.run.failed or self.run.finished

    def _ending(self) -> bool:
        """True if the run is about to end: all ranks have, one failed, or nobody can go on."""
        over = not self.run.waiting or self.run.failed
        return over or (self.deadlocked and not self.run.wait_forever)

    def _note_ends(self) -> None:
        for name, members in self.run.live.info.groups.items():
            self._board.group(name, members)
        outcomes = list(self.run.outcomes.values())
        tolerated = {o.rank for o in outcomes if o.tolerated}
        for rank, end in report.ends(outcomes).items():
            why = end.text.partition("\n")[0]
            why += "; the others go on without it" * (rank in tolerated)
            self._board.end(rank, end.how, why)

    def _on_end(self) -> None:
        """A rank has ended, or another has taken its place: who looks is told at once."""
        with self.run.changed:
            self._disturbed = True
            for one in self.run.replaced[self._replaced :]:
                self._replaced += 1
                self._board.replaced(one.node, one.how)
            again = self._free & {one.node for one in self.run.replaced}
            self._renew()
        self._go(again, None)
        self._changed()

    def _renew(self) -> None:
        """Count what happens although nobody was let go to the present moment."""
        if self._stands and self._disturbed:
            self._note_ends()
            self.moments[-1] = self._now(self.moments[-1].choice)

    def _on_events(self, events: list[Event]) -> None:
        with self.run.changed:
            self._board.feed(events)
            self._heard.update(e.rank for e in events)
            self._last = max([self._last, *(e.time for e in events)])
            self._renew()
            self.run.changed.notify_all()
        if self._disturbed or not events:
            self._changed()

    @property
    def _paused_so_far(self) -> float:
        """Seconds of all pauses but the present one."""
        return self._pauses[-1][-1] if self._pauses else 0.0

    def _clock(self, at: float) -> float:
        """A time with the pauses before it cut out; within a pause, its beginning."""
        if self._stands and at >= self._last + self._paused_so_far:
            return self._last
        for begin, before, total in reversed(self._pauses):
            if at >= begin:
                return max(begin - before, at - total)
        return at
