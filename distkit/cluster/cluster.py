"""The cluster as its user sees it."""

from __future__ import annotations

import os
import signal
import socket
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from msgspec import structs

from distkit.cluster import card, machine
from distkit.cluster.gpus import CPU
from distkit.cluster.notebook import Cell, OfCells, cell, in_notebook, name_running_cell
from distkit.cluster.pickling import pack
from distkit.cluster.plan import DEFAULT, HEARTBEAT_TIMEOUT, Plan, make_plan
from distkit.cluster.process_host import Fleet
from distkit.cluster.processes.forkserver import ANSWER, end, server
from distkit.cluster.rank import seeds
from distkit.cluster.runs import report
from distkit.cluster.runs.conductor import ENDS_WITHIN, Conductor
from distkit.cluster.runs.ranks import Ranks
from distkit.cluster.runs.run import Run, ended_by_interrupt, follow
from distkit.cluster.runs.stepper import Stepper
from distkit.cluster.supervisor import Supervisor
from distkit.companions import load
from distkit.diagnosis.diagnose import Finding
from distkit.errors import ClusterError, RunStopped, StartError, StoppedError
from distkit.gone import GONE
from distkit.recording import trouble

#: Environment variables by which a site has the ranks of all clusters on other machines.
_SITE = "DISTKIT_ENGINES", "DISTKIT_HOSTS"

_made: weakref.WeakSet[Cluster] = weakref.WeakSet()


def _disown_all() -> None:
    """In a process that this one has forked: all clusters, and what they run, are the parent's."""
    for cluster in _made:
        room = cluster._room
        room.closed = room.forked = True
        if room.run is not None:
            room.run.forked = True


os.register_at_fork(after_in_child=_disown_all)
_of_cells = OfCells(lambda cluster: cluster.stop())


class Cluster:
    """Real ``torch.distributed`` ranks behind this notebook or script.

    The constructor returns at once and shows a status card; the first use waits until the ranks
    are ready. All processes end with :meth:`stop`, at the end of the ``with`` block, when the
    object is garbage-collected, and when this kernel ends in any way.

    Args:
        ranks: number of ranks, default 4.
        workers: the same as ``ranks``, in the terms of a parameter server.
        servers: number of parameter servers; with servers there is a scheduler, too. With other
            machines they go round these, and the scheduler is on the first.
        device: "auto" (GPUs if there are any), "cpu", "cuda" or "cuda:0".
        backend: "auto" (nccl if every rank has its own GPU, else gloo), "gloo" or "nccl".
        threads: torch threads per rank; None for as many as the cgroup's quota allows.
        memory_fraction: the part of its GPU's memory that torch may take on a rank, in (0, 1]; by
            default an equal part of what is free where ranks share a GPU, else all.
        heartbeat_timeout: with servers: seconds after which a worker or server without a sign of
            life is ended, and treated as crashed. One that is only computing gives signs of life.
        hosts: how many ranks on which machines, reached by SSH: ``{"alpha": 2, "beta": 2}``; or
            only machines, which get the ranks in blocks.
        engines: have the ranks started by this launcher of ipyparallel's: "slurm", "mpi", "ssh", ….
            A site's default for it and for ``hosts`` are the environment variables
            ``DISTKIT_ENGINES`` and ``DISTKIT_HOSTS`` (names, separated by commas), with options as
            JSON in ``DISTKIT_OPTIONS``.
        interface: with other machines: an address of this one that they reach, or a machine to
            which the right interface leads; with the port, if it has to be a certain one:
            ``"10.0.0.1:45000"``; or a socket that listens. Found out by default.
        timeout: with other machines: seconds that they may take to come; a job's wait in a queue
            does not count.
        options: with other machines: the launcher's configuration, such as ``ssh_args=[…]`` or
            ``account="physics"``.

    Raises:
        StartError: this machine cannot provide what was asked for; the message says what it can.

    Example:
        >>> import distkit as dk
        >>> def hello():
        ...     return f"rank {dist.get_rank()} of {dist.get_world_size()}"
        >>> with dk.Cluster(2) as cluster:           # doctest: +SKIP
        ...     cluster.run(hello).results
        ['rank 0 of 2', 'rank 1 of 2']
    """

    def __init__(
        self,
        ranks: int | None = None,
        *,
        workers: int | None = None,
        servers: int = 0,
        device: str = "auto",
        backend: str = "auto",
        threads: int | None = None,
        memory_fraction: float | None = None,
        heartbeat_timeout: float = HEARTBEAT_TIMEOUT,
        hosts: Mapping[str, int] | Sequence[str] | None = None,
        engines: str = "",
        interface: str | socket.socket = "",
        timeout: float = 60.0,
        **options: Any,
    ) -> None:
        if not heartbeat_timeout > 0:
            raise StartError(f"heartbeat_timeout={heartbeat_timeout}: give seconds, more than 0.")
        if ranks is not None and workers is not None:
            raise StartError("give ranks or workers, not both: dk.Cluster(workers=4, servers=2)")
        given = ranks if ranks is not None else workers
        for option in options:
            if gone := GONE.get(f"dk.Cluster({option}=…)"):
                raise StartError(gone)
        if hosts is not None or engines or any(map(os.environ.get, _SITE)):
            remote = load("distkit_hosts.remote.site").request(
                given,
                hosts,
                engines,
                options,
                interface=interface,
                timeout=timeout,
                device=device,
                backend=backend,
                threads=threads,
                memory_fraction=memory_fraction,
            )
            _of_cells.add(cell(), self)
            self._open_remote(remote, servers, heartbeat_timeout)
            return
        if options:
            raise TypeError(f"Cluster() got an unexpected keyword argument {next(iter(options))!r}")
        _of_cells.add(cell(), self)
        plan = make_plan(
            DEFAULT if given is None else given,
            servers,
            device,
            backend,
            cpus=machine.cpus(),
            memory=machine.memory(),
            gpus=server().gpus(device),
            threads=threads,
            memory_fraction=memory_fraction,
        )
        report.warn([plan.crowd] if plan.crowd else [], UserWarning)
        self._open(plan, heartbeat_timeout)

    @classmethod
    def attach(
        cls,
        cluster: Any,
        *,
        servers: int = 0,
        device: str = "auto",
        backend: str = "auto",
        threads: int | None = None,
        memory_fraction: float | None = None,
        interface: str | socket.socket = "",
        timeout: float = 60.0,
    ) -> Cluster:
        """Ranks in the engines of an ipyparallel cluster that somebody else has started.

        Every engine stands for a rank. The engines stay when this cluster is stopped; the ranks end
        with their engine.

        Args:
            cluster: an ``ipyparallel.Client``, or the name of a profile or cluster for one.
            servers: number of parameter servers, on the engines' machines.
            device: as of :class:`Cluster`, and so are all that follow.
            backend: see ``device``.
            threads: see ``device``.
            memory_fraction: see ``device``.
            interface: see ``device``.
            timeout: see ``device``.

        Raises:
            StartError: there is no such cluster, or it has no engines.

        Example:
            >>> cluster = dk.Cluster.attach("site")  # doctest: +SKIP
        """
        remote = load("distkit_hosts.remote.site").attached(
            cluster,
            interface=interface,
            timeout=timeout,
            device=device,
            backend=backend,
            threads=threads,
            memory_fraction=memory_fraction,
        )
        self = cls.__new__(cls)
        _of_cells.add(cell(), self)
        self._open_remote(remote, servers, HEARTBEAT_TIMEOUT)
        return self

    def _open_remote(self, remote: Any, servers: int, heartbeat_timeout: float) -> None:
        """Start the processes on other machines; what these have is known when they are there."""
        count, note = remote.count, "on other machines"
        plan = Plan(count, servers, "gloo", (CPU,) * count, 1, note)
        self._open(plan, heartbeat_timeout, remote.start)

    def _open(
        self,
        plan: Plan,
        heartbeat_timeout: float = HEARTBEAT_TIMEOUT,
        start_hosts: Callable[..., Fleet] | None = None,
    ) -> None:
        """Start the processes, and what goes with every cluster."""
        with _uninterrupted():
            self._room = Supervisor(plan, heartbeat_timeout, start_hosts)
            self._end = weakref.finalize(self, Supervisor.close, self._room)
        self._runs = 0
        self._latest: Run | None = None
        self._ranks: Ranks  # of that
        self._stepper: tuple[object, Stepper] | None = None
        self._busy = threading.Lock()
        if in_notebook():
            self._room.card.show()
        _made.add(self)  # from now on ``%%ranks`` runs on it

    # -- running ----------------------------------------------------------------

    def run(
        self,
        fn: Callable[..., Any] | str | Path,
        *args: Any,
        wait_forever: bool = False,
        seed: int | None = None,
        **kwargs: Any,
    ) -> Run:
        """Run a function, or a torchrun-style script, on every rank, and wait for it.

        The function is pickled with everything it captures; ``args`` and ``kwargs`` are the same on
        every rank, and ``dist.get_rank()`` tells the ranks apart. A ``.py`` path runs as
        ``__main__`` with ``args`` as its arguments. Ranks that wait for each other forever
        are released with an explanation, unless ``wait_forever``. Each run has processes of its
        own, as under torchrun: settings, threads and children of the function end with it.

        Every rank draws different random numbers, as under torchrun. A run with the same
        ``seed`` draws the same ones again: each rank derives the seeds of torch's, numpy's and
        Python's generators from it. Without one the run chooses a seed, and stores it
        in ``run.trace.info.seed``. A parameter ``seed`` of the function gets it as well.

        Raises:
            DeadlockError: ranks waited for each other forever; it says which, where and why.
            RankError: the function raised on a rank; the others were released.
            RankDied: a rank's process ended.
            NotPicklableError: an object cannot be pickled; the message names it.
            StoppedError: the cluster was stopped.
        """
        return follow(self.submit(fn, *args, wait_forever=wait_forever, seed=seed, **kwargs))

    def submit(
        self,
        fn: Callable[..., Any] | str | Path,
        *args: Any,
        wait_forever: bool = False,
        seed: int | None = None,
        **kwargs: Any,
    ) -> Run:
        """Like :meth:`run`, but return at once: the run's timeline is live, ``wait()`` blocks."""
        return self._submit(fn, args, kwargs, wait_forever=wait_forever, seed=seed)

    def execute(
        self,
        source: str,
        ranks: Iterable[int] | None = None,
        *,
        step: bool = False,
        file: str = "",
        seed: int | None = None,
    ) -> Run | Stepper:
        """Run source code on the ranks, whose variables persist; ``%%ranks`` calls this.

        ``torch``, ``dist``, ``rank`` and ``world_size`` are predefined. The value of an expression
        in the last line is printed, and is in ``results``.

        Args:
            source: Python code, as in a notebook's cell.
            ranks: which ranks; None for all.
            step: pause before each communication call, as :meth:`step` does.
            file: the source's name in tracebacks.
            seed: of the ranks' random numbers, as in :meth:`run`; without one the generators
                continue from the previous cell.

        Raises:
            SyntaxError: the source is not valid Python.
            ClusterError: there is no such rank.
        """
        file = file or name_running_cell(source)
        compile(source, file, "exec")
        chosen = range(self.plan.ranks) if ranks is None else sorted(set(ranks))
        if unknown := [r for r in chosen if r not in range(self.plan.ranks)]:
            raise ClusterError(
                f"there is no rank {unknown[0]}: this cluster has ranks 0 to {self.plan.ranks - 1}."
            )
        do = self.step if step else self.run
        return do(Cell(source, file, list(chosen)), seed=seed)

    def step(
        self,
        fn: Callable[..., Any] | str | Path,
        *args: Any,
        wait_forever: bool = False,
        seed: int | None = None,
        **kwargs: Any,
    ) -> Stepper:
        """Like :meth:`run`, but pause every rank before each of its communication calls.

        This works for any program, DDP included. In a notebook the stepper is displayed as a
        cockpit.

        Example:
            >>> stepper = cluster.step(ring, x)          # doctest: +SKIP
            >>> stepper.next().next(rank=1).finish().results                # doctest: +SKIP
        """
        here = cell()
        earlier = self._stepper
        if earlier is not None and here is not None and earlier[0] == here:
            earlier[1].stop()  # the cell runs again
        run = self._submit(fn, args, kwargs, wait_forever=wait_forever, seed=seed, step=True)
        stepper = Stepper(run, self._ranks.go, self._ranks.settle)
        self._stepper = here, stepper
        try:
            stepper.settle()
        except KeyboardInterrupt:
            stepper.stop()
            raise
        return stepper

    def _submit(
        self,
        fn: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        wait_forever: bool = False,
        seed: int | None = None,
        **options: Any,
    ) -> Run:
        seed, kwargs = seeds.of_call(fn, kwargs, seed)
        payload = pack(fn, args, kwargs)
        self.wait()
        with self._busy:
            running = self._room.run
            if running is not None and running.ending:
                self._room.settled.wait(ANSWER)  # its processes may wait for an import
                running = self._room.run
            self.wait()
            if running is not None:
                raise ClusterError(self._busy_with(running))
            made = trouble.current()
            if made is not None:
                made.check(self.plan.ranks, self.plan.servers)
            self._runs += 1
            name = getattr(fn, "__name__", None) or Path(str(fn)).name
            is_cell, record = isinstance(fn, Cell), options.get("record", True)
            try:
                ranks = self._ranks = self._room.fork(self._runs, cell=is_cell, recording=record)
                conductor = Conductor(
                    name,
                    self._runs,
                    [*range(self.plan.ranks)],
                    structs.replace(ranks.info(), seed=seed),
                    stepped=options.get("step", False),
                    wait_forever=wait_forever,
                    expected_exits=made.kill if made is not None else (),
                    is_cell=is_cell,
                )
                run = self._latest = Run(conductor)
                options = {**options, "trouble": made, "seed": seed}
                with ended_by_interrupt(run), _uninterrupted():
                    self._room.submit(ranks, conductor, payload, options)
            except RunStopped:
                raise
            except KeyboardInterrupt:
                raise RunStopped(
                    f"{name} was interrupted while its processes started; nothing ran."
                ) from None
            except StartError:
                if self._room.closed:
                    raise self._stopped() from None
                raise
        return run

    def _busy_with(self, run: Conductor) -> str:
        if self.stepper is not None and self.stepper.run.number == run.number:
            return (
                f"the cluster is stepping through {run.name}. Let it run to its end "
                "(cluster.stepper.finish()), or end it (cluster.interrupt())."
            )
        return (
            f"the cluster is busy with {run.name}. Wait for it (run.wait()), or end it "
            "(cluster.interrupt())."
        )

    # -- looking after it -------------------------------------------------------

    def wait(self, timeout: float | None = None) -> Cluster:
        """Wait until all ranks are ready.

        Raises:
            StartError: they could not be started.
            RunStopped: the wait was interrupted; the ranks continue to start.
            TimeoutError: they were not ready within ``timeout`` seconds.
        """
        if self._room.closed:
            raise self._stopped()
        try:
            ready = self._room.ready.wait(timeout)
        except KeyboardInterrupt:
            raise RunStopped(
                "interrupted while the ranks are starting; nothing ran. They continue to start, "
                "and the cluster is usable as soon as they are ready. cluster.stop() ends them."
            ) from None
        if not ready:
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

    def kill(self, name: str) -> None:
        """End a process with SIGKILL, on whichever machine it is: a crash.

        It returns when the process has ended.

        Args:
            name: of the process, as the status card has it: "rank 1", "server 0", "scheduler".

        Raises:
            ClusterError: there is no such process.

        Example:
            >>> cluster.kill("server 0")                 # doctest: +SKIP
        """
        processes = self.wait()._room.processes
        numbers = {known.name: n for n, known in processes.info().ranks.items()}
        if name not in numbers:
            raise ClusterError(f"there is no {name!r} here. There are {', '.join(numbers)}.")
        child, heard = processes.children.get(numbers[name]), threading.Event()
        if child is None:
            raise ClusterError(
                f"{name} has no process now: processes start and end with their run. Kill it "
                "during a run, for example one that cluster.submit() has started."
            )
        child.on_exit(lambda status: heard.set())  # after the cluster, which asked before
        end([child])
        heard.wait(ENDS_WITHIN)

    def diagnose(self) -> list[Finding]:
        """The mistakes in the current or latest run: which rank waits for which, and why."""
        run = self._room.run or self._latest
        return [] if run is None else run.findings

    def restart(self) -> Cluster:
        """End the current run and the engines; the variables of ``%%ranks`` cells are lost."""
        if self._room.closed:
            raise self._stopped()
        self._room.restart()
        return self.wait()

    @property
    def client(self) -> Any:
        """The ``ipyparallel.Client`` of the engines in which ``%%ranks`` cells run.

        Each engine is a rank of one process group. They start with their first use.

        Example:
            >>> cluster.client[:].apply_sync(dist.get_rank)  # doctest: +SKIP
            [0, 1, 2, 3]
        """
        return self.wait()._room.start_engines().client

    def _stopped(self) -> StoppedError:
        if self._room.forked:
            return StoppedError(report.of_fork("the cluster"))
        return StoppedError(
            f"the cluster was stopped. Make a new one: dk.Cluster({self.plan.wish})."
        )

    def stop(self) -> None:
        """End every process of the cluster and remove its folder; a second time it does nothing."""
        self._end.detach()
        self._room.close()

    @property
    def stepper(self) -> Stepper | None:
        """The latest stepper, such as that of a ``%%ranks --step`` cell."""
        return self._stepper[1] if self._stepper is not None else None

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

    def _ipython_display_(self) -> None:
        if in_notebook():
            self._room.card.show()
        else:
            print(self)


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Defer an interrupt to the end of the block: a call that only some ranks have would hang."""
    elsewhere = threading.current_thread() is not threading.main_thread()
    if elsewhere or signal.getsignal(signal.SIGINT) is None:  # its handler is a program's in C
        yield
        return
    came: list[int] = []  # a mask would not do: any other thread takes the signal for this one
    before = signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came:
            signal.raise_signal(signal.SIGINT)


def latest() -> Cluster | None:
    """The cluster of this process that was made last, and still is."""
    alive = [c for c in _made if not c._room.closed]
    return max(alive, key=lambda c: c._room.started, default=None)
