"""One run, from the call until it is over: its straggler, its progress, its words."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableSequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

from distkit.cluster.cluster import Cluster
from distkit.cluster.runs.run import GRACE, LET_GO, Run
from distkit.experiments.clusters import PERIOD
from distkit.experiments.controls import OWN, RANKS, STRAGGLER
from distkit.recording import trouble
from distkit.recording.progress import Meter


def submit(cluster: Cluster, fn: Callable[..., Any], setting: dict[str, Any]) -> Run:
    """Start a run on ranks that are ready.

    Raises:
        ClusterError: the cluster is busy.
    """
    arguments = {name: value for name, value in setting.items() if name not in OWN}
    lost = setting.get(STRAGGLER, 0)
    with _straggler(setting[RANKS] - 1, lost) if lost else nullcontext():
        return cluster._submit(fn, (), arguments)


def follow(
    run: Run, meter: Meter, tell: Callable[[], None], printed: MutableSequence[str] | None = None
) -> None:
    """Wait until a run is over, and tell again and again how far it has come.

    Args:
        run: what to wait for; it is ended when this is left by an exception.
        meter: is fed with its events.
        tell: called again and again.
        printed: where lines go that ranks print; None: they are printed here.

    Raises:
        RankError, DeadlockError, …: as :meth:`distkit.Run.wait`.
    """
    forget = run.subscribe(meter.feed)
    try:
        while not _over(run, printed):
            tell()
    finally:
        forget()
        if not run.finished:
            run.interrupt()
            run._done.wait(GRACE + 2 * LET_GO)


def _over(run: Run, printed: MutableSequence[str] | None) -> bool:
    """Wait a moment; whether it has ended."""
    if printed is None:
        with suppress(TimeoutError):
            run.wait(PERIOD)
            return True
        return False
    run._looked = True  # the panel says it, no warning does
    over = run._done.wait(PERIOD)
    printed.extend(f"[rank {rank}] {line}" for rank, _, line in run.prints.take())
    if over and run.error is not None:
        raise run.error
    return over


@contextmanager
def _straggler(rank: int, seconds: float) -> Iterator[None]:
    """Let one rank lose time in every run that starts here, besides the trouble there is."""
    made = trouble.current() or trouble.Trouble()
    with trouble.trouble(
        delay={**made.delay, rank: seconds},
        latency=made.latency,
        bandwidth=made.bandwidth,
        drop_rank=made.drop,
        kill=made.kill,
    ):
        yield
