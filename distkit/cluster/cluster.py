"""The user's interface to a cluster."""

from __future__ import annotations

import os
import socket
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from distkit.cluster import card, machine
from distkit.cluster.notebook import (
    Cell,
    CellRegistry,
    in_notebook,
    name_running_cell,
    running_cell_id,
    warn,
)
from distkit.cluster.pickling import pack
from distkit.cluster.plan import DEFAULT_RANKS, Plan, make_plan
from distkit.cluster.processes.fork_client import RESPONSE_TIMEOUT, kill_processes, server
from distkit.cluster.processes.rank_spec import call_seed
from distkit.cluster.runs.conductor import INTERRUPT_TIMEOUT, Conductor
from distkit.cluster.runs.run import Run, follow
from distkit.cluster.runs.stepper import Stepper
from distkit.cluster.supervisor import Supervisor
from distkit.diagnosis import diagnose, rules  # noqa: F401  not in a thread: programs may fork
from distkit.errors import ClusterError, RunStopped, StartError, StoppedError
from distkit.imports import load
from distkit.recording import faults

#: Environment variable with a site's arguments for clusters that specify no machines or launcher.
_SITE = "DISTKIT_CLUSTER"

_clusters: weakref.WeakSet[Cluster] = weakref.WeakSet()


def _forget_clusters() -> None:
    """Mark clusters as stopped in a forked child, because its parent owns them."""
    for cluster in _clusters:
        cluster._supervisor.closed = True


os.register_at_fork(after_in_child=_forget_clusters)
_cells = CellRegistry(lambda cluster: cluster.stop())


class Cluster:
    """Real ``torch.distributed`` ranks that this notebook or script controls.

    The constructor does not wait for the ranks; in a notebook, it shows a status card. The first
    use waits until the ranks are ready. All processes end when :meth:`stop` is called, at the end
    of the ``with`` block, when the object is garbage-collected, or when this kernel exits for any
    reason.

    Args:
        ranks: number of ranks, default 4.
        workers: alias of ``ranks`` for clusters with parameter servers.
        servers: number of parameter servers; if there are any, a scheduler is started too. If
            there are several machines, servers are assigned to them round-robin, and the scheduler
            runs on the first machine.
        device: "auto" (GPUs if available), "cpu", "cuda" or "cuda:0".
        backend: "auto" (nccl if every rank has its own GPU, else gloo), "gloo" or "nccl".
        threads: torch threads per rank, or None to share the available processors equally.
        hosts: number of ranks on each machine, such as ``{"alpha": 2, "beta": 2}``; or a list of
            machines, to which the ranks are assigned in blocks.
        engines: ipyparallel launcher that starts the ranks: "slurm", "mpi", …; with ``hosts``, the
            default is "ssh". A site can set this and other arguments by a JSON object in the
            environment variable ``DISTKIT_CLUSTER``. They apply only if the call passes neither
            ``hosts`` nor ``engines``.
        interface: an address of this machine that the other machines can reach, such as
            ``"10.0.0.1"`` or ``"10.0.0.1:45000"``; or a machine that this one reaches through the
            right interface; or a listening socket. Detected by default.
        timeout: time limit for other machines to connect [s]; the time that a job spends in the
            queue does not count.
        options: options of the launcher that starts ranks on other machines, such as
            ``ssh_args=[…]`` or ``account="physics"``.

    Raises:
        StartError: the request is invalid or cannot be met; the message explains why.

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
        hosts: Mapping[str, int] | Sequence[str] | None = None,
        engines: str = "",
        interface: str | socket.socket = "",
        timeout: float = 60.0,
        **options: Any,
    ) -> None:
        if ranks is not None and workers is not None:
            raise StartError("pass ranks or workers, not both: dk.Cluster(workers=4, servers=2)")
        count = ranks if ranks is not None else workers
        _cells.add(running_cell_id(), self)
        site = os.environ.get(_SITE, "")
        if hosts is not None or engines or site:
            remote = load("distkit_hosts.remote.site").request(
                count,
                hosts,
                engines,
                options,
                site,
                interface=interface,
                timeout=timeout,
                device=device,
                backend=backend,
                threads=threads,
            )
            self._open_remote(remote, servers)
            return
        if options:
            raise TypeError(f"Cluster() got an unexpected keyword argument {next(iter(options))!r}")
        plan = make_plan(
            DEFAULT_RANKS if count is None else count,
            servers,
            device,
            backend,
            cpus=machine.cpus(),
            memory=machine.memory(),
            gpus=server().gpus(device),
            threads=threads,
        )
        if plan.oversubscription_warning:
            warn([plan.oversubscription_warning], UserWarning)
        self._open(plan)

    @classmethod
    def attach(
        cls,
        cluster: Any,
        *,
        servers: int = 0,
        device: str = "auto",
        backend: str = "auto",
        threads: int | None = None,
        interface: str | socket.socket = "",
        timeout: float = 60.0,
    ) -> Cluster:
        """Start ranks alongside the engines of a running ipyparallel cluster, one per engine.

        The engines keep running when this cluster is stopped; a rank exits with its engine.

        Args:
            cluster: an ``ipyparallel.Client``, or the name of the cluster's ipyparallel profile.
            servers: number of parameter servers, on the engines' machines.
            device: see :class:`Cluster`.
            backend: see :class:`Cluster`.
            threads: see :class:`Cluster`.
            interface: see :class:`Cluster`.
            timeout: see :class:`Cluster`.

        Raises:
            StartError: no such cluster is running, or it has no engines.

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
        )
        self = cls.__new__(cls)
        _cells.add(running_cell_id(), self)
        self._open_remote(remote, servers)
        return self

    def _open_remote(self, remote: Any, servers: int) -> None:
        """Start processes on other machines; the plan is refined once the machines connect."""
        plan = Plan(remote.count, servers, "gloo", ("cpu",) * remote.count, 1, "on other machines")
        self._open(plan, remote.start)

    def _open(
        self,
        plan: Plan,
        start_hosts: Callable[..., Any] | None = None,
        show_card: bool = True,
    ) -> None:
        """Start the processes and initialize the attributes."""
        self._supervisor = Supervisor(plan, start_hosts)
        self._finalizer = weakref.finalize(self, Supervisor.close, self._supervisor)
        self._runs = 0
        self._latest: Run | None = None
        #: The latest stepper, for example from a ``%%ranks --step`` cell.
        self.stepper: Stepper | None = None
        self._submit_lock = threading.Lock()
        if show_card and in_notebook():
            self._supervisor.card.show()
        _clusters.add(self)  # ``%%ranks`` cells now run on this cluster

    # -- running ----------------------------------------------------------------

    def run(
        self,
        fn: Callable[..., Any] | str | Path,
        *args: Any,
        wait_forever: bool = False,
        seed: int | None = None,
        **kwargs: Any,
    ) -> Run:
        """Run a function or a torchrun-style script on every rank and wait until it has finished.

        The function is pickled with everything it captures. All ranks get the same ``args`` and
        ``kwargs``; ``dist.get_rank()`` returns the rank. A ``.py`` file runs as ``__main__``
        with ``args`` as its arguments. Deadlocked ranks are stopped with an explanation, unless
        ``wait_forever`` is set. Each run has its own processes, as under torchrun, so the
        function's settings, threads and child processes end with the run.

        Every rank draws different random numbers, as under torchrun. A run with the same ``seed``
        draws the same numbers again, because each rank derives the seeds of torch's, numpy's and
        Python's generators from ``seed``. If you pass no seed, the run draws one and stores it in
        ``run.trace.info.seed``. A seed that you pass is also passed to the function if it has a
        parameter ``seed``.

        Raises:
            DeadlockError: ranks would wait forever; the message explains where and why.
            RankError: the function raised on a rank; the other ranks were stopped.
            RankDied: a rank's process exited.
            NotPicklableError: an object cannot be pickled; the message names it.
            ClusterError: another run is in progress.
            StoppedError: the cluster was stopped.
        """
        return follow(
            self.submit(fn, *args, wait_forever=wait_forever, seed=seed, **kwargs), args, kwargs
        )

    def submit(
        self,
        fn: Callable[..., Any] | str | Path,
        *args: Any,
        wait_forever: bool = False,
        seed: int | None = None,
        **kwargs: Any,
    ) -> Run:
        """Like :meth:`run`, but return once the run has started.

        ``run.wait()`` waits until it has finished.
        """
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
        """Run source code on the ranks, as ``%%ranks`` does; variables persist between calls.

        ``torch``, ``dist``, ``rank`` and ``world_size`` are predefined. If the code ends with an
        expression, its value is printed, unless it is None, and stored in the run's ``results``.

        Args:
            source: Python code, as in a notebook's cell.
            ranks: the ranks that run it, or None for all.
            step: pause before each communication call, as :meth:`step` does.
            file: the file name shown in tracebacks; generated by default.
            seed: seed for the ranks' random numbers, as in :meth:`run`; if None, the
                generators continue from the previous cell.

        Raises:
            SyntaxError: the source is not valid Python.
            ClusterError: a rank does not exist.
        """
        file = file or name_running_cell(source)
        compile(source, file, "exec")
        selected = range(self.plan.ranks) if ranks is None else sorted(set(ranks))
        if unknown := [r for r in selected if r not in range(self.plan.ranks)]:
            raise ClusterError(
                f"rank {unknown[0]} does not exist: the ranks are 0 to {self.plan.ranks - 1}."
            )
        return (self.step if step else self.run)(Cell(source, file, list(selected)), seed=seed)

    def step(
        self,
        fn: Callable[..., Any] | str | Path,
        *args: Any,
        wait_forever: bool = False,
        seed: int | None = None,
        **kwargs: Any,
    ) -> Stepper:
        """Like :meth:`run`, but pause every rank before each communication call.

        This works for any program, including DDP. In a notebook the stepper is displayed as a
        cockpit. A new stepper ends the previous one.

        Example:
            >>> stepper = cluster.step(ring, x)          # doctest: +SKIP
            >>> stepper.next().next(rank=1).finish().results                # doctest: +SKIP
        """
        if self.stepper is not None:
            self.stepper.stop()
        run = self._submit(fn, args, kwargs, wait_forever=wait_forever, seed=seed, step=True)
        stepper = self.stepper = Stepper(run, self._ranks)
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
        seed, kwargs = call_seed(fn, kwargs, seed)
        payload = pack(fn, args, kwargs)
        self.wait()
        with self._submit_lock:
            # the previous run's processes may still be importing a module
            if (current := self._supervisor.run) is not None and current.ending:
                self._supervisor.run_ended.wait(RESPONSE_TIMEOUT)
                current = self._supervisor.run
            self.wait()
            if current is not None:
                raise self._busy_error(current)
            injected_faults = faults.current()
            injected_faults.check(self.plan.ranks, self.plan.servers)
            self._runs += 1
            name = getattr(fn, "__name__", None) or Path(str(fn)).name
            try:
                ranks = self._ranks = self._supervisor.prepare(self._runs, fn, payload)
                conductor = Conductor(
                    name,
                    self._runs,
                    [*range(self.plan.ranks)],
                    ranks.info(),
                    stepped=options.get("step", False),
                    wait_forever=wait_forever,
                    expected_exits=injected_faults.kill,
                    is_cell=isinstance(fn, Cell),
                )
                run = self._latest = Run(conductor)
                options = {**options, "faults": injected_faults, "seed": seed}
                self._supervisor.submit(ranks, conductor, payload, options)
            except KeyboardInterrupt:
                raise RunStopped(
                    f"{name} was interrupted while its processes were starting; nothing ran."
                ) from None
        return run

    def _busy_error(self, run: Conductor) -> ClusterError:
        state, remedy = (
            ("stepping through", "Finish it (cluster.stepper.finish())")
            if run.stepped
            else ("busy with", "Wait for it (run.wait())")
        )
        return ClusterError(
            f"the cluster is {state} {run.name}. {remedy}, or end it (cluster.interrupt())."
        )

    # -- state and control ------------------------------------------------------

    def wait(self) -> Cluster:
        """Wait until all ranks are ready.

        Raises:
            StoppedError: the cluster was stopped.
            StartError: the ranks could not be started.
            RunStopped: the wait was interrupted; the ranks continue to start.
        """
        if self._supervisor.closed:
            raise StoppedError(
                "the cluster was stopped, or belongs to another process. Create a new one."
            )
        try:
            self._supervisor.ready.wait()
        except KeyboardInterrupt:
            raise RunStopped(
                "interrupted while the ranks were starting; nothing ran. They continue to start, "
                "and the cluster is usable once they are ready. To end them, use cluster.stop()."
            ) from None
        if self._supervisor.stage == "failed":
            raise StartError(self._supervisor.failure)
        return self

    def status(self) -> card.Status:
        """Return the name, host, pid, device and state of every process of the cluster."""
        return card.status(self._supervisor)

    def interrupt(self) -> None:
        """Interrupt the current run on every rank; the cluster stays usable."""
        if (run := self._supervisor.run) is not None:
            run.interrupt()

    def kill(self, name: str) -> None:
        """Kill a process on any machine with SIGKILL and wait for it to exit.

        Args:
            name: the process's name on the status card, such as "rank 1", "worker 1", "server 0" or
                "scheduler".

        Raises:
            ClusterError: the process does not exist, or is not running.

        Example:
            >>> cluster.kill("server 0")                 # doctest: +SKIP
        """
        processes = self.wait()._supervisor.processes
        numbers = {info.name: n for n, info in processes.info().ranks.items()}
        child = processes.children.get(numbers.get(name, -1))
        if child is None:
            raise ClusterError(
                f"{name!r} {'is not running' if name in numbers else 'does not exist'}. During a "
                f"run, the processes are {', '.join(numbers)}. Start a run with cluster.submit()."
            )
        kill_processes([child])
        child.wait(INTERRUPT_TIMEOUT)

    def diagnose(self) -> list[rules.Finding]:
        """Return the findings about the current or latest run, such as deadlocks."""
        run = self._supervisor.run or self._latest
        return [] if run is None else run.findings

    def restart(self) -> Cluster:
        """Stop the current run and the engines; the variables of ``%%ranks`` cells are lost."""
        self.wait()._supervisor.restart()
        return self

    @property
    def client(self) -> Any:
        """The ``ipyparallel.Client`` of the engines that run ``%%ranks`` cells.

        Each engine is one rank of the same process group. The engines start on first use.

        Example:
            >>> cluster.client[:].apply_sync(dist.get_rank)  # doctest: +SKIP
            [0, 1, 2, 3]
        """
        return self.wait()._supervisor.start_engines().client

    def stop(self) -> None:
        """Terminate all processes and remove the cluster's folder; a second call does nothing."""
        self._finalizer.detach()
        self._supervisor.close()

    @property
    def plan(self) -> Plan:
        """The cluster's ranks, servers, backend, devices and threads."""
        return self._supervisor.plan

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        return repr(self.status())

    def _ipython_display_(self) -> None:
        if in_notebook():
            self._supervisor.card.show()
        else:
            print(self)


def latest() -> Cluster | None:
    """Return this process's latest cluster that has not been stopped, or None if there is none."""
    return max(
        (c for c in _clusters if not c._supervisor.closed),
        key=lambda c: c._supervisor.start_time,
        default=None,
    )
