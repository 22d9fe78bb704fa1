"""A hundred bugs: programs with one mistake each, and whether the explanation is the right one.

The programs stand in modules by theme, most of them after public issue threads, retold in a few
lines; :mod:`distkit.hangs` adds its own. Run one theme with ``DISTKIT_BUGS=experts``.
"""

from __future__ import annotations

import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from benchmarks.bugs.catalogue import BUGS, Bug
from benchmarks.figure import Figure, figure
from distkit.diagnosis.findings import Finding, Kind
from distkit.events import State

if TYPE_CHECKING:
    from distkit.cluster.runs.run import Run

#: The modules of the catalogue.
THEMES = "data", "checkpoints", "shapes", "groups", "pipelines", "experts", "failures"

#: An explanation is late after this long since the last rank began to wait [s].
LATE = 2.0

#: A run that nothing has ended after this long [s] is interrupted.
PATIENCE = 90.0


@dataclass(frozen=True)
class Verdict:
    """What was said of a bug, and what is wrong with that: "" for nothing."""

    bug: Bug
    finding: Finding | None
    shown: str
    seconds: float
    wrong: tuple[str, ...]

    def row(self) -> dict[str, Any]:
        """The verdict as plain data."""
        said = "" if self.finding is None else str(self.finding)
        return {
            "bug": self.bug.name,
            "theme": self.bug.theme,
            "thread": self.bug.thread,
            "seconds": round(self.seconds, 3),
            "wrong": list(self.wrong),
            "said": said,
        }


def measure(reps: int, say: Callable[[str], None]) -> tuple[list[Figure], dict[str, Any]]:
    """Every bug ``reps`` times; the worst verdict of each counts."""
    from distkit.cluster.cluster import Cluster

    verdicts, bugs = [], catalogue()
    with ExitStack() as stack:
        clusters = {n: stack.enter_context(Cluster(n)) for n in sorted({b.ranks for b in bugs})}
        for bug in bugs:
            tried = [judge(bug, clusters[bug.ranks].run) for _ in range(reps)]
            worst = max(tried, key=lambda v: (len(v.wrong), v.seconds))
            say(f"bugs: {_line(worst)}")
            verdicts.append(worst)
    return _figures(verdicts), {"bugs": [v.row() for v in verdicts]}


def catalogue() -> list[Bug]:
    """All bugs; those of the themes in ``DISTKIT_BUGS``, if that is set."""
    for theme in THEMES:
        import_module(f"benchmarks.bugs.{theme}")
    wanted = os.environ.get("DISTKIT_BUGS", "").split(",")
    found = [*BUGS, *_hangs()]
    return [b for b in found if wanted == [""] or b.theme in wanted or b.name in wanted]


def _hangs() -> list[Bug]:
    """The catalogue that students know, without the one that is no bug."""
    from distkit import hangs

    return [
        Bug(case.program, "hangs", "", (case.kind,), case.culprits, (), case.ranks, case.how)
        for case in hangs.ALL.values()
        if case.kind is not Kind.STRAGGLER
    ]


# -- one bug ------------------------------------------------------------------------------


def judge(bug: Bug, start: Callable[[Callable[[], None]], Run] | None = None) -> Verdict:
    """Run a bug, and compare what is said of it with what is expected.

    Args:
        bug: of the catalogue.
        start: runs a function on the bug's number of ranks; on fresh ones when None.
    """
    from distkit.cluster.runs.run import Run
    from distkit.cluster.runs.run_ranks import run_ranks
    from distkit.errors import CommunicationWarning, RunError, RunStopped

    ended = ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", CommunicationWarning)
        try:
            with _limit(PATIENCE):
                run = start(bug.program) if start else run_ranks(bug.program, bug.ranks)
        except (RunError, RunStopped) as error:
            assert isinstance(error.run, Run)
            run, ended = error.run, str(error)
    now = time.monotonic()
    shown = "\n".join([ended, *(str(w.message) for w in caught)])
    finding = next(iter(run.findings), None)
    waits = [e.time for e in run.trace if e.state is State.BLOCKED]
    seconds = now - float(run.trace.meta["until"])  # it ended by itself, and was looked through
    if explained := run._conductor.explained:
        seconds = explained - max(waits)
    return Verdict(bug, finding, shown, seconds, tuple(_wrong(bug, finding, shown, seconds)))


@contextmanager
def _limit(seconds: float) -> Iterator[None]:
    """Press the stop button after so many seconds."""

    def stop(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _wrong(bug: Bug, finding: Finding | None, shown: str, seconds: float) -> list[str]:
    if finding is None:
        return ["nothing was found"]
    said = str(finding)
    found = []
    if finding.kind not in bug.kinds:
        found.append(f"kind {finding.kind}, not {bug.kinds[0]}")
    if finding.culprits != bug.culprits:
        found.append(f"culprits {finding.culprits}, not {bug.culprits}")
    found += [f"no word of {line}" for line in bug.lines if line not in said]
    found += [f"no {word!r}" for word in bug.says if word.lower() not in said.lower()]
    if finding.kind not in (Kind.RAISED, Kind.DIED) and bug.how != "fails" and said not in shown:
        found.append("not shown")
    if seconds > LATE:
        found.append(f"late: {seconds:.1f} s")
    return found


def _line(verdict: Verdict) -> str:
    wrong = f": {'; '.join(verdict.wrong)}" if verdict.wrong else ""
    return f"{verdict.bug.theme}.{verdict.bug.name} {verdict.seconds:.2f} s{wrong}"


def _figures(verdicts: list[Verdict]) -> list[Figure]:
    count, absolute = len(verdicts), True
    wrong = [v for v in verdicts if v.wrong]
    blamed = [v for v in wrong if any(w.startswith(("culprits", "nothing")) for w in v.wrong)]
    share = 100 * (1 - len(wrong) / count)
    explained = Figure(
        f"of {count} bugs: explained in {LATE:g} s with culprit, line and remedy",
        "%",
        share,
    )
    return [
        explained,
        figure(
            f"of {count} bugs: not fully explained",
            "bugs",
            [float(len(wrong))],
            must=0.05 * count,
            aim=0.0,
            absolute=absolute,
        ),
        figure(
            f"of {count} bugs: a wrong culprit, or none",
            "bugs",
            [float(len(blamed))],
            must=0.0,
            aim=0.0,
            absolute=absolute,
        ),
        figure(
            "last rank waiting to the explanation",
            "s",
            [v.seconds for v in verdicts],
            must=LATE,
            aim=0.5,
            absolute=absolute,
        ),
    ]
