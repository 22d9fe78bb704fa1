"""The rank's side: what runs in each forked process.

A rank has a lifeline (a :class:`Channel` to the process that started the cluster), a process
group, and :func:`execute`, which runs one function. When the lifeline breaks, the rank and
everything it started are gone at once.
"""

from __future__ import annotations

import builtins
import os
import signal
import sys
import threading
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import torch

from distkit import companions
from distkit.cluster.notebook import Cell
from distkit.cluster.pickling import captured, dumps
from distkit.cluster.processes.channel import Channel
from distkit.cluster.processes.rank_spec import LATE, Spec
from distkit.cluster.rank import gpu, interpreter, seeds
from distkit.cluster.rank.gate import Gate
from distkit.cluster.rank.outbox import Outbox
from distkit.cluster.rank.process_group import NCCL, Group
from distkit.cluster.runs.outcome import (
    SIGINT,
    Failure,
    Outcome,
    Released,
    describe,
    released_in,
    text,
)
from distkit.events import WORLD
from distkit.recording import recorder
from distkit.recording.blackbox import BlackBox
from distkit.recording.recorder import Flusher, Recorder
from distkit.recording.tap import tap
from distkit.recording.trouble import Dropped, OnRank
from distkit.recording.witness import RollCall, Witness

#: The notebook's backend for matplotlib, and the one that takes its place on ranks.
INLINE, FIGURES = "module://matplotlib_inline.backend_inline", "distkit.cluster.rank.figures"

#: A cell hears a signal within this time [s], unless it waits in C++.
HEARS = 0.3

#: Sends a message about the run to the kernel: a kind, and what.
Emit = Callable[[str, Any], None]


class Rank:
    """This process as a rank. There is one: ``Rank.here``.

    Args:
        spec: what it is told about itself.
        lifeline: to the process that started it.
        runs_cells: it runs ``%%ranks`` cells, one after the other, and keeps their variables;
            otherwise it runs one function, and a release ends the process.
    """

    here: Rank

    def __init__(self, spec: Spec, lifeline: Channel, *, runs_cells: bool = False) -> None:
        Rank.here = self
        self.spec, self.lifeline, self.outbox = spec, lifeline, Outbox(lifeline)
        self._runs_cells, self.group = runs_cells, Group(spec)
        #: The variables of cells; an engine's own, so that %px sees them.
        self.namespace: dict[str, Any] = {
            "torch": torch,
            "dist": torch.distributed,
            "rank": spec.rank,
            "world_size": spec.world_size,
            "__name__": "__main__",
        }
        self._pid = os.getpid()
        self._box_file = Path(spec.folder, f"{spec.name}.box")
        self._box = BlackBox(self._box_file)
        self._gates: dict[int, Gate] = defaultdict(Gate)  # of stepped runs; words may come early
        self._running: int | None = None  # number of the run whose function is executing
        self._released = 0  # number of the latest run that the kernel has ended
        self._let_go = threading.Event()  # the run that executes is released
        self._idle = threading.Event()  # no function is executing
        #: What the function has raised: the end of its variables may hang, so they are kept.
        self._raised: BaseException | None = None
        self._close_record: Callable[[], None] = lambda: None

    def start(self) -> None:
        """Take over the kernel's surroundings, and watch the lifeline from now on."""
        spec = self.spec
        os.environ.clear()
        os.environ.update(spec.environ)
        os.environ.update(spec.launched, DISTKIT_RANK=str(spec.rank))
        if spec.backend == "nccl":
            os.environ.update(NCCL)
        if os.environ.get("MPLBACKEND", INLINE) == INLINE:
            os.environ["MPLBACKEND"] = f"module://{FIGURES}"
        with suppress(OSError):
            os.chdir(spec.cwd)
        torch.set_num_threads(spec.threads)
        seeds.set_all()  # forked processes would all draw the same numbers
        tap.on_gloo = spec.backend == "gloo"
        if spec.device != "cpu":
            gpu.take(spec)
            tap.remove()  # it is to be outside: a receive is over when its copy has come back
            if tap.on_gloo:
                gpu.stage_messages()
            tap.on_gpu = True
            tap.install()
        self.group.adopt_user_calls()
        self.outbox.capture(f"{spec.folder}/{spec.name}.out")
        builtins.input = _no_keyboard
        interpreter.look_after_children(self._forget)
        interpreter.explain_launchers(spec.rank)
        self.lifeline.listen(self._handle, partial(os.killpg, 0, signal.SIGKILL))

    def _forget(self) -> None:
        """In a child process: this is no rank any more."""
        self.lifeline.close_here()
        self.group.leave_user_calls()

    # -- the lifeline -----------------------------------------------------------

    def _handle(self, message: tuple[Any, ...]) -> None:
        """Act on the kernel's message: "go" with a number of permits or None, or "release"."""
        word, run, *permits = message
        if word == "go":
            self._gates[run].allow(*permits)
        elif not (self._runs_cells and self._pull(run)):
            self._leave(run)

    def _leave(self, run: int) -> None:
        """Report where the function is, and end this process, unless it has raised."""
        if self._raised is not None:  # which is being described
            return
        self._close_record()
        error = released_in(threading.main_thread().ident or 0)
        self.outbox.emit(run, "outcome", Outcome(self.spec.rank, error=error))
        self.outbox.drain()
        os.killpg(0, signal.SIGKILL)

    def _pull(self, run: int) -> bool:
        """Have the cell raise; False if it does not, since it waits in C++."""
        self._released = run
        self._let_go.set()
        if run != self._running:
            return True
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        return self._idle.wait(HEARS)

    @property
    def _is_released(self) -> bool:
        return self._running == self._released

    @contextmanager
    def _interruptible(self, run: int) -> Iterator[None]:
        """Let signals and the kernel end the function."""

        def on_signal(*_: Any) -> None:
            raise Released if self._is_released else KeyboardInterrupt(SIGINT)

        before = signal.signal(signal.SIGINT, on_signal)
        self._running = run
        self._idle.clear()
        try:
            if self._is_released:  # the word was quicker than the call
                raise Released
            yield
        finally:
            self._running = None
            self._idle.set()
            signal.signal(signal.SIGINT, before)

    # -- one run ----------------------------------------------------------------

    def show(self, picture: bytes) -> None:
        """Have the notebook show a PNG picture."""
        if self._running is not None:
            self.outbox.emit(self._running, "figure", picture)

    def execute(self, payload: bytes, options: dict[str, Any]) -> None:
        """Run one pickled ``(fn, args, kwargs)`` and report how it went; never raises."""
        emit = partial(self.outbox.emit, options["run"])
        with self.outbox.printing(options["run"]), self._watching_the_network(emit):
            outcome = self._perform(payload, options, emit)
        emit("outcome", outcome)

    def _perform(self, payload: bytes, options: dict[str, Any], emit: Emit) -> Outcome:
        outcome, run, life = Outcome(self.spec.rank, intact=True), options["run"], options["life"]
        self._raised = None
        try:
            self.group.alone = life > 0
            if not self.group.alone:
                self.group.join()
            with (
                self._recording(options, emit, outcome),
                self._interruptible(run),
                interpreter.outside_of_loops(),
                self._kvstore(options, emit),
            ):
                if options.get("seed") is not None:
                    seeds.set_all(seeds.for_rank(options["seed"], self.spec.rank, life))
                try:
                    value, outcome.grown = self._call(payload, run)
                    tap.rest()
                    if FIGURES in sys.modules:
                        sys.modules[FIGURES].show()
                except Dropped as asked:
                    value, outcome.remark = None, str(asked)
                outcome.result_type = type(value).__name__
                raw = options.get("raw", False)
                outcome.result = memoryview(value).tobytes() if raw else _dump_result(value)
        except BaseException as error:
            outcome.error = self._describe(error)
        outcome.imported = LATE in sys.modules
        return outcome

    def _describe(self, error: BaseException) -> Failure:
        self._raised = error
        told = describe(error, released=isinstance(error, Released))
        said = told.text + interpreter.hint(error) + gpu.hint(error, self.spec)
        return replace(told, text=said, frames=told.frames or interpreter.called(error))

    def _call(self, payload: bytes, run: int) -> tuple[Any, list[str]]:
        """The function's result, and the copies of the notebook's containers that it has filled.

        The latter only if it returns nothing: then they are lost.
        """
        fn, args, kwargs = cloudpickle.loads(payload)
        if isinstance(fn, Cell):
            fn, args = self._run_cell, (fn,)
        if isinstance(fn, Path):
            recorder.make_users(str(fn))
            fn, args, kwargs = interpreter.run_script, (fn, args), {}
        held = {name: (one, len(one)) for name, one in captured(fn, args, kwargs)}
        if not self.group.alone:  # a replacement comes alone
            self.group.enter(run)
        try:
            value = fn(*args, **kwargs)
        finally:
            sys.settrace(None)  # a call that is traced is the user's
            if os.getpid() != self._pid:
                _end_child()
        return value, [n for n, (one, size) in held.items() if value is None and len(one) > size]

    def _run_cell(self, cell: Cell) -> Any:
        if self.spec.rank not in cell.ranks:
            raise Dropped("the cell was not run on it")
        return cell(self.namespace)

    @contextmanager
    def _kvstore(self, options: dict[str, Any], emit: Emit) -> Iterator[None]:
        """In a cluster with servers: let the function create its KVStore."""
        if options["node"] is None:
            yield
            return
        from distkit import kvstore

        kvstore.use(options["node"], partial(emit, "on_crash"))
        try:
            yield
        except BaseException:
            kvstore.release(flush=False)
            raise
        kvstore.release()

    @contextmanager
    def _recording(self, options: dict[str, Any], emit: Emit, outcome: Outcome) -> Iterator[None]:
        if not options.get("record", True):
            tap.remove()
            yield
            return
        tap.install()
        run = options["run"]
        mine = Recorder(
            self.spec.rank, keep=partial(self._box.note, run), stepped=options.get("step", False)
        )
        flusher = Flusher(mine, emit)
        self._close_record = flusher.close
        witness = tap.witness = self._witness(run, emit)

        def on_group(name: str, members: list[int]) -> None:
            emit("group", (name, members))
            witness.meet(name, members)

        tap.groups.on_group = on_group
        tap.on_threads = partial(emit, "threads")
        if mine.stepped:
            gate = self._gates[run]
            gate.arrived = mine.hurry
            tap.before.append(lambda op, nbytes: gate.wait())
        strikes = [] if (made := options.get("trouble")) is None else [OnRank(made, self.spec.rank)]
        tap.before += strikes
        recorder.set_current(mine)
        try:
            yield
            outcome.missed = [text for strike in strikes for text in strike.missed()]
        finally:
            tap.before.clear()
            tap.groups.on_group = tap.witness = None
            self._gates.clear()
            tap.settle()
            outcome.intact = not tap.broken
            outcome.unwaited, outcome.collectives = tap.unwaited.calls(), dict(tap.collectives)
            recorder.set_current(None)
            flusher.close()
            outcome.dropped, outcome.without_values = mine.dropped, mine.without_values
            outcome.unseen = dict(mine.unseen)
            tap.forget()

    @contextmanager
    def _watching_the_network(self, emit: Emit) -> Iterator[None]:
        """Tell which machines this rank does not reach, when that changes."""
        over = threading.Event()
        if self.spec.hosts > 1:
            companions.load("distkit_hosts.links").watch(partial(emit, "unreached"), over)
        yield
        over.set()

    def _witness(self, run: int, emit: Emit) -> Witness:
        """Whoever looks at this run's collectives before they go to the backend."""
        spec, rollcall = self.spec, None
        if spec.backend == "gloo" and spec.hosts == 1:  # it is in memory that all ranks see
            rollcall = RollCall(Path(spec.folder), run, spec.rank)
        self._let_go.clear()
        witness = Witness(emit, rollcall, self._let_go.wait)
        witness.meet(WORLD, list(range(spec.world_size)))  # new_group may be the first call
        return witness


def _no_keyboard(prompt: object = "") -> str:
    raise EOFError(
        "input() has no keyboard on a rank. Ask in the notebook, and pass the answer as an "
        "argument: cluster.run(fn, answer)."
    )


def _end_child() -> None:
    """End a process that the function has forked, and that has come to the function's end."""
    failed = sys.exc_info()[0] is not None
    if failed:
        traceback.print_exc()
    with suppress(Exception):
        sys.stdout.flush()
    os._exit(int(failed))


def _dump_result(value: Any) -> bytes:
    try:
        return dumps(value)
    except (Released, KeyboardInterrupt):
        raise
    except BaseException as e:
        raise _Unpicklable(
            f"the function returned a {type(value).__name__} that cannot travel back "
            f"({type(e).__name__}: {text(e)}). "
            "Return plain data: numbers, strings, lists, dicts, tensors."
        ) from None


class _Unpicklable(TypeError):
    """Told apart by name on the other side."""
