"""The ranks of an experiment, and one run on them, from the call until it is over."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, MutableSequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

from distkit.cluster import limits
from distkit.cluster.cluster import Cluster
from distkit.cluster.plan import Plan, make_plan
from distkit.cluster.processes.forkserver import server
from distkit.cluster.runs.run import GRACE, LET_GO, Run
from distkit.errors import StoppedError
from distkit.experiments.controls import OWN, RANKS, STRAGGLER
from distkit.recording import trouble
from distkit.recording.progress import Meter

#: How often somebody who waits for ranks looks whether to go on waiting [s].
PERIOD = 0.1


class Clusters:
    """Ranks in any number: a given cluster for its own, else one of ours that is kept warm.

    Only the latest of ours lives on: another one takes a fraction of a second.

    Args:
        given: the reader's cluster; it is never stopped here.
    """

    def __init__(self, given: Cluster | None) -> None:
        self.given = given
        self.ours: Cluster | None = None
        self._lock = threading.Lock()
        self._closed = False

    def get(self, ranks: int, given_up: Callable[[], bool]) -> Cluster | None:
        """A cluster that is ready; None if ``given_up()`` came first.

        Raises:
            StartError: this machine cannot give so many.
            StoppedError: the reader's cluster was stopped, or the experiment closed.
        """
        cluster = self._choose(ranks)
        while not given_up():
            try:
                return cluster.wait(PERIOD)
            except TimeoutError:
                continue
        return None

    def _choose(self, ranks: int) -> Cluster:
        if self.given is not None and self.given.plan.ranks == ranks:
            return self.given
        with self._lock:
            if self._closed:
                raise StoppedError("the experiment was closed. Make a new one: run its cell again.")
            ours = self.ours
            if ours is not None and ours.plan.ranks == ranks and ours._room.stage != "failed":
                return ours
            if ours is not None:
                ours.stop()
            self.ours = None  # should there be no other
            self.ours = Background(self._plan(ranks))
            return self.ours

    def _plan(self, ranks: int) -> Plan:
        """A plan like the given cluster's, except for the number of ranks."""
        like = None if self.given is None else self.given.plan
        device = "cpu" if like is not None and {*like.devices} == {"cpu"} else "auto"
        return make_plan(
            ranks,
            0 if like is None else like.servers,
            device,
            "auto",
            cpus=limits.cpus(),
            memory=limits.memory(),
            gpus=server().gpus(device),
        )

    def close(self) -> None:
        """End our cluster."""
        with self._lock:
            self._closed = True
            if self.ours is not None:
                self.ours.stop()


class Background(Cluster):
    """A cluster that shows no card, belongs to no cell and is not what ``%%ranks`` runs on."""

    def __init__(self, plan: Plan) -> None:
        self._open(plan)


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
