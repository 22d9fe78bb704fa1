"""The ranks of an experiment: the reader's own cluster, and one of another size when asked for."""

from __future__ import annotations

import threading
from collections.abc import Callable

from distkit.cluster import limits
from distkit.cluster.cluster import Cluster
from distkit.cluster.plan import Plan, make_plan
from distkit.cluster.processes.forkserver import server
from distkit.errors import StoppedError

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
        """As the given cluster, but for the number of ranks."""
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
