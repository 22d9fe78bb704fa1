"""The cluster as its user sees it."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from distkit.cluster import card, limits
from distkit.cluster.forkserver import server
from distkit.cluster.notebook import in_notebook, shell
from distkit.cluster.pickling import pack
from distkit.cluster.plan import Plan, make_plan
from distkit.cluster.room import Room
from distkit.cluster.run import GRACE, LET_GO, Run
from distkit.errors import ClusterError, StartError, StoppedError

_by_cell: dict[object, weakref.ref[Cluster]] = {}


class Cluster:
    """Real ``torch.distributed`` ranks behind this notebook or script.

    Returns at once and shows a status card; the first use waits until the ranks are ready.
    All its processes end with :meth:`stop`, with the ``with`` block, when the object is
    forgotten, and when this kernel ends, whatever way.

    Args:
        ranks: how many ranks, default 4.
        workers: the same, said in the words of a parameter server.
        servers: how many parameter servers; with servers there is a scheduler too.
        device: "auto" (GPUs where there are some), "cpu", "cuda" or "cuda:0".
        backend: "auto" (nccl when every rank has a GPU of its own, else gloo), "gloo" or "nccl".
        threads: torch threads per rank; as many as the cgroup's quota gives when None.

    Raises:
        StartError: this machine cannot give what was asked for; the message says what it can.

    Example:
        >>> import distkit as dk
        >>> def hello():
        ...     return f"rank {dist.get_rank()} of {dist.get_world_size()}"
        >>> with dk.Cluster(2) as cluster:           # doctest: +SKIP
        ...     cluster.run(hello).results
        ['rank 0 of 2', 'rank 1 of 2']
    """

    def __init__(
        self, ranks: int | None = None, *, workers: int | None = None, servers: int = 0,
        device: str = "auto", backend: str = "auto", threads: int | None = None,
    ) -> None:  # fmt: skip
        if ranks is not None and workers is not None:
            raise StartError("give ranks or workers, not both: dk.Cluster(workers=4, servers=2)")
        count = next((n for n in (ranks, workers) if n is not None), 4)
        _stop_earlier(_cell(), self)
        plan = make_plan(
            count, servers, device, backend, cpus=limits.cpus(), memory=limits.memory(),
            gpus=server().gpus(device), threads=threads,
        )  # fmt: skip
        self._card = card.Card()
        self._room = Room(plan, self._card.refresh)
        self._card.show(self._room)
        self._runs = 0
        self._busy = threading.Lock()
        self._end = weakref.finalize(self, Room.close, self._room)

    # -- running ----------------------------------------------------------------

    def run(self, fn: Callable[..., Any] | str | Path, *args: Any, **kwargs: Any) -> Run:
        """Run a function, or a torchrun-style script, on every rank, and wait for it.

        The function travels with everything it captures; ``args`` and ``kwargs`` are the same on
        every rank, which tells itself apart by ``dist.get_rank()``. A ``.py`` path runs as
        ``__main__`` with ``args`` as its arguments.

        Raises:
            RankError: the function raised on a rank; the others were released.
            RankDied: a rank's process ended; another takes its place.
            NotPicklableError: something cannot travel; the message names it.
            StoppedError: the cluster was stopped.
        """
        return card.follow(self.submit(fn, *args, **kwargs))

    def submit(self, fn: Callable[..., Any] | str | Path, *args: Any, **kwargs: Any) -> Run:
        """As :meth:`run`, without waiting: the run's timeline is live, ``wait()`` waits."""
        return self._submit(fn, args, kwargs, record=True)

    def _submit(
        self, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, record: bool
    ) -> Run:
        payload = pack(fn, args, kwargs)
        self.wait()
        with self._busy:
            running = self._room.run
            if running is not None and running.ending:
                self._room.settled.wait(GRACE + 2 * LET_GO)
                running = self._room.run
            self.wait()
            if running is not None:
                raise ClusterError(
                    f"the cluster is busy with {running.name}. Wait for it (run.wait()), or end it "
                    "(cluster.interrupt())."
                )
            self._runs += 1
            name = getattr(fn, "__name__", None) or Path(str(fn)).name
            run = Run(name, self._runs, sorted(self._room.ranks), self._room.meta())
            self._room.submit(run, payload, record=record)
        return run

    # -- looking after it -------------------------------------------------------

    def wait(self, timeout: float | None = None) -> Cluster:
        """Wait until all ranks are ready.

        Raises:
            StartError: they could not be started.
            TimeoutError: they were not ready within ``timeout`` seconds.
        """
        if self._room.closed:
            raise StoppedError("the cluster was stopped. Make a new one: dk.Cluster(4).")
        if not self._room.await_ready(timeout):
            raise TimeoutError(f"the ranks are not ready after {timeout} s; they still start")
        if self._room.stage == "failed":
            raise StartError(self._room.failure)
        return self

    def status(self) -> card.Status:
        """Every process of the cluster: role, rank, host, pid, device, state."""
        return card.status(self._room)

    def interrupt(self) -> None:
        """End the current run on every rank at once; the cluster stays usable."""
        run = self._room.run
        if run is not None:
            run.interrupt()

    def restart(self) -> Cluster:
        """Replace every rank by a fresh process: variables, imports and memory start anew."""
        if self._room.closed:
            raise StoppedError("the cluster was stopped. Make a new one: dk.Cluster(4).")
        self.interrupt()
        run = self._room.run
        if run is not None:
            run._done.wait(10)
        self._room.restart()
        return self.wait()

    def stop(self) -> None:
        """End every process of the cluster and remove its folder; a second time it does nothing."""
        self._end()

    @property
    def plan(self) -> Plan:
        """Ranks, servers, backend, devices and threads, as decided."""
        return self._room.plan

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        return repr(self.status())

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        return self._card.bundle(self._room)


def _cell() -> object | None:
    """What identifies the notebook cell, or script line, that is making a cluster."""
    if not in_notebook():
        return None
    metadata = (shell().kernel.get_parent("shell") or {}).get("metadata", {})
    if "cellId" in metadata:
        return str(metadata["cellId"])
    frame = sys._getframe(2)
    return frame.f_code.co_filename, frame.f_lineno


def _stop_earlier(cell: object | None, cluster: Cluster) -> None:
    """Running a cell again replaces the cluster that it made before."""
    if cell is None:
        return
    earlier = _by_cell.pop(cell, lambda: None)()
    if earlier is not None:
        earlier.stop()
    _by_cell[cell] = weakref.ref(cluster)
