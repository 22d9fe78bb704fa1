"""What a function does to its rank: told rightly, in time, and the next run is as ever."""

from __future__ import annotations

import re
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass, field
from io import StringIO
from typing import Any

from benchmarks.abuses import ALL, Abuse
from benchmarks.figure import Figure, figure
from benchmarks.settings import settings

#: Nothing may take longer than this [s].
BOUND = 20.0


@dataclass
class Verdict:
    """How it went: what the run said, and ``wrong``, what must not be. Times in seconds."""

    name: str
    said: str = ""
    seconds: float = 0.0
    next_run: float = 0.0
    restart: float = 0.0
    wrong: list[str] = field(default_factory=list)


def measure(reps: int, say: Callable[[str], None]) -> tuple[list[Figure], dict[str, Any]]:
    """Every entry of the catalogue once, on a cluster of two ranks."""
    verdicts = judge(ALL, say)
    for verdict in verdicts:
        say(line(verdict))
    bad = [v for v in verdicts if v.wrong]
    slowest = max(max(v.seconds, v.next_run, v.restart) for v in verdicts)
    return [
        figure(
            f"abuses, of {len(verdicts)}, that are told wrongly or harm what follows",
            "abuses",
            [float(len(bad))],
            must=0,
            aim=0,
            absolute=True,
        ),
        figure(
            "the longest that a run, the next one or a restart took",
            "s",
            [slowest],
            must=BOUND,
            aim=5.0,
            absolute=True,
        ),
    ], {"abuses": [asdict(v) for v in verdicts]}


def judge(abuses: dict[str, Abuse], say: Callable[[str], None]) -> list[Verdict]:
    """Try these one after the other; a cluster that is of no more use is made anew."""
    trial = Trial()
    verdicts = []
    try:
        for name, abuse in abuses.items():
            say(f"abuse: {name}")
            verdicts.append(trial.of(name, abuse))
            if verdicts[-1].wrong:
                trial.close()
                trial = Trial()
    finally:
        trial.close()
    return verdicts


def line(verdict: Verdict) -> str:
    """One line of the table."""
    times = f"{verdict.seconds:5.1f} {verdict.next_run:5.1f} {verdict.restart:5.1f} s"
    mark = "WRONG" if verdict.wrong else "right"
    return f"{mark} {times} {verdict.name}: {'; '.join(verdict.wrong) or verdict.said[:90]}"


class Trial:
    """A cluster, and what its ranks' settings are when nobody has changed anything."""

    def __init__(self) -> None:
        from distkit import Cluster

        self.cluster = Cluster(2)
        self.clean = self._settings()

    def close(self) -> None:
        """End it."""
        _within(BOUND, self.cluster.stop)

    def _settings(self) -> list[dict[str, Any]]:
        """Those of both ranks; imports add filters of warnings, so the second run's count."""
        first, settled = (self.cluster.run(settings).results for _ in range(2))
        return [{**a, "warnings": b["warnings"]} for a, b in zip(first, settled, strict=True)]

    def of(self, name: str, abuse: Abuse) -> Verdict:
        """Have rank 1 do it; look at what is said, at the next run and at a restart."""
        verdict = Verdict(name)
        before = [row[2] for row in self.cluster.status().rows]
        with (
            redirect_stdout(StringIO()),
            redirect_stderr(StringIO()),
            warnings.catch_warnings(record=True) as warned,
        ):
            warnings.simplefilter("always")
            verdict.seconds = self._timed(verdict, "the run", lambda: self._run(abuse, verdict))
            verdict.next_run = self._timed(verdict, "the next run", lambda: self._next(verdict))
            after = [row[2] for row in self.cluster.status().rows]
            verdict.restart = self._timed(verdict, "restart", lambda: self._restart(verdict))
        told = " ".join([verdict.said, *(str(w.message) for w in warned)])
        fresh = re.search(r"rank \d+ has a new process", told) is not None
        if abuse.replaced not in (None, fresh) or (fresh and before == after):
            verdict.wrong.append(f"a new process: {fresh}")
        return verdict

    def _run(self, abuse: Abuse, verdict: Verdict) -> None:
        run = self.cluster.submit(abuse.program)
        if abuse.endless:
            self._interrupt(run)
        value, first = None, ""
        try:
            value = run.wait(BOUND).results[1]
            verdict.said = repr(value)[:200]
        except BaseException as error:
            verdict.said = f"{type(error).__name__}: {error}"
            first = str(error).partition("\n")[0]
        if bool(abuse.ending) != bool(first) or re.search(abuse.ending, first) is None:
            verdict.wrong.append(f"not {abuse.ending!r}, but {verdict.said[:400]!r}")
        elif value != abuse.value:
            verdict.wrong.append(f"not {abuse.value!r:.60}, but {verdict.said[:400]!r}")

    def _interrupt(self, run: Any) -> None:
        run._conductor.prints.print_until(lambda: run.finished, 2.0)
        self.cluster.interrupt()

    def _next(self, verdict: Verdict) -> None:
        now = self._settings()
        verdict.wrong += [
            f"rank {rank} has another {key}: {now[rank].get(key)!r:.80}, was {value!r:.80}"
            for rank in range(2)
            for key, value in self.clean[rank].items()
            if now[rank].get(key) != value
        ]

    def _restart(self, verdict: Verdict) -> None:
        self.cluster.restart()
        if self.cluster.run(int).results != [0, 0]:
            verdict.wrong.append("no run after a restart")

    def _timed(self, verdict: Verdict, what: str, act: Callable[[], None]) -> float:
        began = time.monotonic()
        verdict.wrong += [f"{what}: {fault}" for fault in _within(BOUND + 5, act)]
        return time.monotonic() - began


def _within(seconds: float, act: Callable[[], None]) -> list[str]:
    """Call it in a thread: what it raised, or that it takes too long."""
    faults: list[str] = []

    def call() -> None:
        try:
            act()
        except BaseException as error:
            faults.append(f"{type(error).__name__}: {str(error)[:300]}")

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)
    return ["it hangs"] if thread.is_alive() else faults
