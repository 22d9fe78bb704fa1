"""The engine room: the processes of one cluster, started, heard, replaced and ended.

One lock guards ipyparallel's client: JupyterLab runs widget callbacks on threads of their own.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from msgspec import structs

from distkit._format import named
from distkit.cluster.hosts.clocks import Offset
from distkit.cluster.hosts.fleet import Fleet, Place, Wish
from distkit.cluster.hosts.store import NAME
from distkit.cluster.kvstore_nodes import Nodes
from distkit.cluster.plan import Plan
from distkit.cluster.processes import folders
from distkit.cluster.processes.forkserver import Child, Stop, end
from distkit.cluster.processes.rank_spec import Spec, free_port, surroundings
from distkit.cluster.processes.roles import CHILD_ENDED, PORTS
from distkit.cluster.runs.conductor import LET_GO, Conductor, RankController
from distkit.cluster.runs.outcome import Failure, Outcome
from distkit.cluster.runs.report import MOST_REPLACEMENTS, cause
from distkit.errors import ClusterError, DistkitError, StartError
from distkit.trace.info import RunInfo

#: Heartbeat of the hub [ms], and how many may fail: a starved laptop is not a dead engine,
#: and the fork server reports the deaths of processes at once.
PERIOD, MISSES = 50, 1200

#: How long the ranks may take to register [s]: generous, for laptops under load.
PATIENCE = 120.0

#: Who was killed has ended within this time [s].
ENDED = 5.0

#: The controller forgets a rank that has ended within this time [s].
FORGOTTEN = 10.0

#: Whose connections broke has ended, or does so within this time [s]; or else it hangs.
ENDS = 1.0

#: What a rank's process runs.
_ENGINE = "distkit.cluster.processes.roles:engine"

_WIPED = (
    "the cluster's folder {} was removed, perhaps by a program that cleans temporary folders, and "
    "its ranks cannot meet without it."
)


class Engines:
    """ipyparallel's client of one cluster: which ranks have registered, how a call reaches them.

    Args:
        connection: what the controller says about itself.
        folder: the cluster's own.
    """

    def __init__(self, connection: dict[str, Any], folder: str) -> None:
        import ipyparallel

        self._connection, self._folder = connection["engine"], folder
        self._idents: dict[int, str] = {}
        self._forgotten: set[str] = set()
        self._client: Any = ipyparallel.Client(
            connection["client"], profile_dir=folder, ipython_dir=folder, timeout=PATIENCE
        )

    def seen_from(self, folder: str) -> dict[str, Any]:
        """What the controller says to engines, which find its sockets in this folder."""
        text = json.dumps(self._connection).replace(self._folder, folder)
        return dict(json.loads(text))

    def name(self, rank: int) -> str:
        """A name for the process that is about to be this rank."""
        self._idents[rank] = f"rank-{rank}-{secrets.token_hex(4)}"
        return self._idents[rank]

    def find(self, rank: int) -> int | None:
        """ipyparallel's id of a rank's engine, None when it has not registered."""
        ident = self._idents[rank]
        return next((i for i, u in list(self._client._engines.items()) if u == ident), None)

    def apply(
        self,
        rank: int,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        reply: Callable[[Any], None],
    ) -> None:
        """Have a rank call a function; ``reply`` is called with the future that is done."""
        # through the stream: a bare socket's send can swallow the news of a reply
        future = self._client.send_apply_request(
            self._client._mux_stream,
            function,
            args,
            ident=self._client._engines[self.find(rank)].encode(),
        )
        future.add_done_callback(reply)

    def forget(self, rank: int) -> None:
        """Tell the hub that an engine is gone, as ipyparallel's nanny would."""
        engine, client, ident = self.find(rank), self._client, self._idents[rank]
        if engine is not None and ident not in self._forgotten:
            self._forgotten.add(ident)

            def send() -> None:
                client.session.send(
                    client._query_stream, "unregistration_request", content={"id": engine}
                )

            client._io_loop.add_callback(send)

    def close(self) -> None:
        """Hang up."""
        with suppress(Exception):
            self._client.close()


class Supervisor(RankController):
    """The processes of one cluster.

    ``stage`` says how far starting has come, ``on_change`` is called when it or a rank's
    state changes.

    Args:
        wish: the other machines, if ranks are to be there.
    """

    def __init__(
        self,
        plan: Plan,
        on_change: Callable[[], None],
        heartbeat_timeout: float,
        wish: Wish | None = None,
    ) -> None:
        super().__init__(plan, hub=True)
        #: The other machines, and where the ranks of each are.
        self._fleet = None if wish is None else Fleet(wish, self.folder, self._stage)
        self._places: list[Place] = []
        self._on_change, self._heartbeat_timeout = on_change, heartbeat_timeout
        self.stage, self.failure, self._port = "starting", "", free_port()
        self.nodes = Nodes(plan, self._fork, self.folder, self._hear_node, heartbeat_timeout)
        self.generation = 0
        self._beginning: set[int] = set()  # ranks that are forked again
        self.started = time.monotonic()
        self.run: Conductor | None = None
        self.ready = threading.Event()
        self.settled = threading.Event()  # the latest run and its aftermath are over
        self.closed = self.forked = False  # forked: it is the parent's of this process
        self._over = False  # it has failed, for good
        self._up = False  # has been ready once: from then on ranks that end are replaced
        self._lock, self._failing = threading.RLock(), threading.Lock()
        self._engines: Engines | None = None
        self._controller: Child | None = None
        self._call: tuple[bytes, dict[str, Any]] = b"", {}  # of the latest run
        self._deaf = [self._fork.on_loss(self._fail)]  # to hear no loss any more
        threading.Thread(target=self._start, name="distkit-start", daemon=True).start()

    # -- starting ---------------------------------------------------------------

    def _start(self) -> None:
        try:
            self._start_all()
            self._up = True
            if self._controller is not None:
                self._controller.on_exit(self._on_controller_exit)
            self._stage("ready")
        except Exception as error:
            self.failure = self._explain(error)
            self._stage("failed")
            self.ready.set()  # who waits hears why, while what was started ends
            self._end_all()
        finally:
            if self.closed:  # stopped while starting: end also what was started since
                self._end_all()
            self.ready.set()

    def _start_all(self) -> None:
        fork = self._fork
        if self._fleet is not None:
            self._fleet.start()  # at once: it takes longest
        fork.preload("ipyparallel.controller.app")
        self._controller = fork.fork(
            "distkit.cluster.processes.roles:controller",
            folder=self.folder,
            log="controller.log",
            period=PERIOD,
            misses=MISSES,
        )
        if self._fleet is None:
            fork.preload("distkit.cluster.processes.preload:hook")
        self._stage("importing torch")
        try:
            connection = self._controller.channel.recv()
        except EOFError:
            raise StartError(
                "ipyparallel's controller did not start. " + self._log("controller.log")
            ) from None
        self._engines = Engines(connection, self.folder)
        if self._fleet is not None:
            self._settle_in(self._fleet)
            self._stage("importing torch")
        self.nodes.start()
        self._fork_ranks(range(self.plan.ranks), join=0)
        self._stage("waiting for the ranks")
        self._await_registration(range(self.plan.ranks))

    def _settle_in(self, fleet: Fleet) -> None:
        """Have a folder on each machine, whose sockets lead to this one's, and a plan that fits."""
        sockets = {f"s:{n}": f"s-{n}" for n in range(1, PORTS + 1)} | {NAME: NAME}
        self._places = self.nodes.places = fleet.gather()
        for first, place in enumerate(self._places):
            place.servers = range(first, self.plan.servers, len(self._places))
            nodes = sum(self.nodes.place(n) is place for n in self.nodes.roles)
            processes = len(place.ranks) + nodes
            place.folder = place.server.make_folder(processes, like=self.folder, sockets=sockets)
            self._deaf.append(place.server.on_loss(self._fail))
        self.plan = fleet.wish.plan(self._places, self.plan.servers)

    def _offset(self, rank: int) -> Offset | None:
        """The clock of the machine that a rank is on; None if it is this machine's."""
        place = self.place(rank)
        return None if place is None else place.server.clock

    def place(self, rank: int) -> Place | None:
        """The other machine on which a rank is, or another node; None on this one."""
        ranks = (place for place in self._places if rank in place.ranks)
        return next(ranks, None) or self.nodes.place(rank)

    @property
    def engines(self) -> Engines:
        """ipyparallel's client, once the controller has told where it is."""
        assert self._engines is not None
        return self._engines

    def reports(self, rank: int) -> bool:
        """True if a rank's engine has said that it is there."""
        return self._engines is not None and self._engines.find(rank) is not None

    def _hear_node(self, node: int, kind: str, what: Any) -> None:
        """Pass on what a server or the scheduler records."""
        if kind == "missed":
            threading.Thread(target=self._missed, args=what, daemon=True).start()
        elif self.run is not None:
            self.run.hear(node, kind, what)

    def settle(self, run: int) -> None:
        """RankController: have the servers and the scheduler hand over what they still hold."""
        self.nodes.settle()

    def _fork_ranks(self, ranks: Iterable[int], join: int | None) -> None:
        """Fork ranks, on all machines at once."""
        asked = []
        for r in ranks:
            place = self.place(r)
            server = self._fork if place is None else place.server
            asked.append((r, server, server.ask_for(_ENGINE, [self._engine(r, place, join)])))
        for r, server, lifelines in asked:
            child = self.ranks[r] = server.adopt_all(lifelines)[0]
            child.hear(partial(self._hear_rank, r))
            child.on_exit(partial(self._on_exit, r, child))
            child.on_stop = partial(self._on_stop, r)

    def _engine(self, r: int, place: Place | None, join: int | None) -> dict[str, Any]:
        """What a rank's process is told when it is forked."""
        folder = self.folder if place is None else place.folder
        return {
            "spec": self._spec(r, place),
            "connection": self.engines.seen_from(folder),
            "ident": self.engines.name(r),
            "generation": join,
            "profile": folder,
            "folder": folder,
            "log": f"rank-{r}.log",
        }

    def _spec(self, r: int, place: Place | None) -> Spec:
        plan = self.plan
        around = surroundings() if place is None else place.surroundings(r, self._places)
        return Spec(
            rank=r,
            world_size=plan.ranks,
            backend=plan.backend,
            seat=plan.seats[r],
            threads=plan.threads,
            node=self.nodes.node("worker", r, place=place) if plan.servers else None,
            **{"folder": self.folder, "port": self._port, **around},
        )

    def _await_registration(self, ranks: Iterable[int]) -> None:
        """Wait until these ranks' engines are known to the client."""
        end = time.monotonic() + PATIENCE
        while missing := [r for r in ranks if self.engines.find(r) is None]:
            ended = [r for r in missing if self.ranks[r].status is not None]
            if ended:
                raise StartError(
                    f"rank {ended[0]} ended while starting "
                    f"({self.ranks[ended[0]].status}). {self._log(f'rank-{ended[0]}.log')}"
                )
            if self._over:
                raise StartError(self.failure)
            if self.closed or time.monotonic() > end:
                raise StartError(
                    f"ranks {missing} did not report within {PATIENCE:.0f} s. The machine may be "
                    "overloaded: stop other programs, or ask for fewer ranks."
                )
            time.sleep(0.005)

    def _explain(self, error: Exception) -> str:
        if not self._fork.alive:
            return self._again(self._fork.why())
        if isinstance(error, DistkitError):
            return str(error)
        log = self._log("controller.log")
        return (
            f"the cluster could not be started ({type(error).__name__}: {error}). The machine may "
            "be overloaded: stop other programs and make the cluster again."
            + (f"\nThe controller's last words:\n{log}" if log else "")
        )

    def _log(self, name: str) -> str:
        """The end of a process's low-level output."""
        with suppress(OSError):
            text = Path(self.folder, name).read_text(errors="replace")[-20_000:]
            said = "\n".join(x for x in text.splitlines() if "[IPController]" not in x)
            return said or folders.is_full(self.folder)
        return folders.is_full(self.folder)

    # -- running ----------------------------------------------------------------

    def await_ready(self, timeout: float | None) -> bool:
        """Wait until all ranks are there; one that has just ended is waited for to be replaced."""
        self._check_folder()
        with self._lock:
            if self._up and any(c.channel.broken() for c in self.ranks.values()):
                self.ready.clear()  # the notice of its end is on its way, and leads to _replace …
                if self._over:
                    self.ready.set()  # … unless all has ended since
        return self.ready.wait(timeout)

    def submit(self, run: Conductor, payload: bytes, options: dict[str, Any]) -> None:
        """Hand the call to every rank; what comes back goes to ``run`` from another thread."""
        options = {**options, "run": run.number, "generation": self.generation}
        missing = [r for r in run.ranks if self.engines.find(r) is None]
        if missing:
            raise ClusterError(f"ranks {missing} have no running process. Call cluster.restart().")
        self.nodes.run = run.number
        self.nodes.start()
        self.run = run
        if self._places:
            run.live.offset = self._offset
        self.settled.clear()
        self.nodes.record(options.get("record", True))
        self._call = payload, options
        for n, child in {**self.ranks, **self.nodes.children}.items():
            if child.stopped[0]:
                run.hear(n, "stopped", child.stopped)
        for r in run.ranks:
            self._execute(run, r, options)
        threading.Thread(target=self._conduct, args=(run,), name="distkit-run", daemon=True).start()

    def _execute(self, run: Conductor, rank: int, options: dict[str, Any]) -> None:
        from distkit.cluster.processes.roles import execute

        reply = partial(self._on_reply, run, rank)
        with self._lock:
            self.engines.apply(rank, execute, (self._call[0], options), reply)

    def replace(self, run: Conductor, rank: int, life: int) -> None:
        """RankController: put another in a dead rank's place, in the middle of its run.

        It runs the function from its beginning. It is in no process group: the others' would
        have to be made anew on every rank.
        """
        with self._lock:
            self._fork_again([rank])
        options = {**self._call[1], "life": life, "generation": None}
        if options.get("trouble") is not None:  # what was to kill the rank has done so
            kill = {r: n for r, n in options["trouble"].kill.items() if r != rank}
            options["trouble"] = replace(options["trouble"], kill=kill)
        self._execute(run, rank, options)

    def _hear_rank(self, rank: int, message: tuple[int, str, Any]) -> None:
        number, kind, what = message
        run = self.run
        if kind == "waits" and (place := self.place(rank)) is not None:
            what = what[0], *place.certainly(*what[1:])
        elif kind == "unreached":
            what = [p.name for p in self._places if p.server.facts["address"] in what]
        if run is not None and run.number == number:
            run.hear(rank, kind, what)

    def _on_reply(self, run: Conductor, rank: int, reply: Any) -> None:
        """The engine answered: what its rank said itself counts, unless it could say nothing."""
        error = reply.exception()
        if error is not None and self.ranks[rank].status is None:
            run.add_outcome(Outcome(rank, error=Failure(type(error).__name__, str(error))))

    def _conduct(self, run: Conductor) -> None:
        run.conduct(self)
        if not run.intact:
            self.generation += 1
        unfit = [] if self.closed else [self.ranks[r] for r, o in run.outcomes.items() if o.unfit]
        end(unfit)
        for child in unfit:
            child.wait(LET_GO)
        try:
            self._replace()
            if self._up and not self.closed:
                self.nodes.start()
        except StartError as error:
            self._fail(str(error))
        finally:
            self.run = self.nodes.run = None
            self.settled.set()
            self._on_change()

    def go(self, run: int, ranks: Iterable[int], count: int | None) -> None:
        """Let these ranks through the gate ``count`` times, or for good when None."""
        for r in ranks:
            with suppress(OSError):
                self.ranks[r].channel.send(("go", run, count))

    # -- ranks that end ---------------------------------------------------------

    def _missed(self, node: int, pid: int) -> None:
        """A process is taken for dead; if it is not, it hangs, and is ended.

        Without a ``pid`` it is the one that is there, if it has had time to give a sign of life.
        """
        child = {**self.ranks, **self.nodes.children}.get(node)
        if child is None or (pid or child.pid) != child.pid:
            return
        if not pid and time.monotonic() < child.forked + self._heartbeat_timeout:
            return
        if child.wait(ENDS) or self.closed:
            return
        if self.run is not None:
            self.run.silent_for[node] = self._heartbeat_timeout
        end([child])

    def _on_stop(self, rank: int, stop: Stop) -> None:
        """A signal has stopped a rank's process, or it continues: say so."""
        if self.run is not None:
            self.run.hear(rank, "stopped", stop)
        self._on_change()

    def _on_exit(self, rank: int, child: Child, status: int) -> None:
        """A rank's process ended: tell the run, and put another in its place."""
        if self.ranks.get(rank) is not child or rank in self._beginning:
            return
        run = self.run
        if run is not None and not run.finished:
            life = run.life(rank)
            run.add_death(rank, status, self.folder)
            self.nodes.leave(run.number, rank, life, cause(status))
        if self.closed:
            return
        self.engines.forget(rank)
        if self._up and (run is None or run.finished):
            self._replace()
        self._on_change()

    def _on_controller_exit(self, status: int) -> None:
        ended = f"ipyparallel's controller ended ({cause(status)})"
        if status == CHILD_ENDED:
            ended = "the heart monitor of ipyparallel's controller ended"
        self._fail(f"{ended}. Without it ranks cannot be reached.")

    def _fail(self, why: str) -> None:
        """The cluster is over: its ranks have ended, or cannot be reached any more."""
        with self._failing:  # not the lock: who replaces ranks has it, until they come or we fail
            if self.closed or not self._up:
                return
            self._up = False  # ranks that end are not replaced any more
            self.failure = self._again(why)
        run = self.run
        if run is not None:
            run.cluster_failure = why
        self._stage("failed")
        self._over = True
        self.ready.set()  # nobody is replaced: who waits for that hears why
        end(list(self.ranks.values()))
        threading.Thread(target=self._tidy, name="distkit-tidy", daemon=True).start()

    def _check_folder(self) -> None:
        """Without their folder ranks cannot meet, and no other can be started."""
        if self._up and not folders.is_there(self.folder):
            self._fail(_WIPED.format(self.folder))

    def _again(self, why: str) -> str:
        """The reason why the cluster is over, and what to do."""
        ended = why.rstrip().removesuffix(".")
        return f"{ended}. Make the cluster again: dk.Cluster({self.plan.wish})."

    def _tidy(self) -> None:
        """End what is left of a cluster that is over, when its last run has told all."""
        if self.run is not None:
            self.settled.wait()
        self._end_all()

    def _replace(self) -> None:
        """Fork new ranks in the place of those that ended."""
        self._check_folder()
        with self._lock:
            gone = self._gone(range(self.plan.ranks))
            if not gone or self.closed or not self._up:
                return
            self.generation += 1
            self.ready.clear()
            self._stage("replacing " + named(gone))
            try:
                self._fork_again(gone)
                self._stage("ready")
            except Exception as error:
                self.failure = self.failure if self._over else str(error)
                self._stage("failed")
            finally:
                self.ready.set()

    def _gone(self, ranks: Iterable[int]) -> list[int]:
        """Those of these ranks that have no process."""
        return [r for r in ranks if self.ranks[r].status is not None]

    def _fork_again(self, gone: list[int]) -> None:
        """Fork new ranks; those that end while they start are replaced in turn, a few times."""
        self._beginning.update(gone)
        try:
            for left in reversed(range(MOST_REPLACEMENTS)):
                try:
                    self._fork_anew(gone)
                    if not self._gone(gone):
                        return
                except StartError:
                    gone = self._gone(gone)
                    if not (gone and left and self._up) or self.closed:
                        raise
        finally:
            self._beginning.clear()

    def _fork_anew(self, gone: list[int]) -> None:
        for r in gone:
            self.engines.forget(r)  # the news of its end may wait for us in this very thread
        end = time.monotonic() + FORGOTTEN
        while any(self.engines.find(r) is not None for r in gone):
            if self._over or self.closed or time.monotonic() > end:
                raise StartError(
                    self.failure
                    or f"ranks {gone} cannot be replaced: ipyparallel's controller "
                    "does not answer. Make the cluster again."
                )
            time.sleep(0.005)
        self._fork_ranks(gone, join=None)
        self._await_registration(gone)

    def restart(self) -> None:
        """End every rank and start new ones in their place."""
        self._check_folder()
        killed = dict(self.ranks)  # others take their places as soon as they have ended
        end(list(killed.values()))
        stay = [r for r, child in killed.items() if not child.wait(ENDED)]
        if stay:
            raise ClusterError(
                f"ranks {stay} did not end within {ENDED:.0f} s, although they were killed. "
                "Use cluster.stop(), and make the cluster again."
            )
        self._replace()

    # -- the end ----------------------------------------------------------------

    def close(self) -> None:
        """End every process of this cluster and remove its folder."""
        if self.closed:
            return
        self.closed = True
        for deafen in self._deaf:
            deafen()
        run = self.run
        if run is not None:
            run.abandon("the cluster was stopped")
        self._end_all()
        self.stage = "stopped"
        self._on_change()

    def _end_all(self) -> None:
        self.nodes.closed = True
        children = [*self.ranks.values(), *self.nodes.children.values()]
        if self._controller is not None:
            children.append(self._controller)
        if self._engines is not None:
            self._engines.close()
        end(children)
        for child in children:
            child.let_go()
        for place in self._places:
            place.server.closed = True
            place.server.remove(place.folder)
        if self._fleet is not None:
            self._fleet.close()
        self._fork.remove(self.folder)

    def _stage(self, stage: str) -> None:
        if not (self.closed or self._over):
            self.stage = stage
            self._on_change()

    def child(self, node: int) -> Child:
        """The process of a rank, a server or the scheduler, by its number."""
        return self.ranks.get(node) or self.nodes.children[node]

    def info(self) -> RunInfo:
        """Facts of the cluster for a trace."""
        known = super().info()
        return structs.replace(known, ranks=known.ranks | self.nodes.info())
