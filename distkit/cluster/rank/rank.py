"""The process of a rank, which runs the user's function.

A rank has a lifeline (a :class:`Channel` to the process that started the cluster), a process
group, and :meth:`Rank.execute`, which runs one function. When the lifeline closes, the rank and its
descendants are killed.
"""

from __future__ import annotations

import builtins
import os
import runpy
import signal
import sys
import threading
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import FunctionType
from typing import Any

import cloudpickle
import torch

from distkit.cluster.notebook import Cell
from distkit.cluster.pickling import dumps
from distkit.cluster.processes.channel import Channel
from distkit.cluster.processes.rank_spec import Spec, rank_seed, set_seeds
from distkit.cluster.rank import gpu
from distkit.cluster.rank.outbox import Outbox
from distkit.cluster.rank.process_group import NCCL, Group
from distkit.cluster.runs.outcome import (
    SIGINT,
    Outcome,
    Released,
    describe,
    describe_position,
    text,
)
from distkit.errors import NotPicklableError
from distkit.events import WORLD
from distkit.recording import recorder
from distkit.recording.call_context import CallContext, CollectiveFingerprint
from distkit.recording.encoding import BlackBox
from distkit.recording.faults import FaultInjector, Faults, LeaveFunction
from distkit.recording.recorder import Flusher, Recorder
from distkit.recording.tap import tap

#: matplotlib's backend in notebooks, which does not work on ranks.
INLINE = "module://matplotlib_inline.backend_inline"

#: Timeout for a cell to handle a signal [s]; a cell that is waiting in C++ cannot handle it.
SIGNAL_TIMEOUT = 0.3

#: Sends a message of a run to the kernel: its kind and data.
Emit = Callable[[str, Any], None]


class Rank:
    """This process as a rank. ``Rank.current`` is the only instance.

    Args:
        spec: its specification.
        lifeline: channel to the process that started it.
        runs_cells: whether it runs ``%%ranks`` cells sequentially and keeps their variables.
            Otherwise it runs one function, and a release ends the process.
    """

    current: Rank

    def __init__(self, spec: Spec, lifeline: Channel, *, runs_cells: bool = False) -> None:
        Rank.current = self
        self.spec, self.outbox = spec, Outbox(lifeline)
        self._runs_cells, self.group = runs_cells, Group(spec)
        #: The variables of cells; also the engine's namespace, so that %px uses them.
        self.namespace: dict[str, Any] = {
            "torch": torch,
            "dist": torch.distributed,
            "rank": spec.rank,
            "world_size": spec.world_size,
            "__name__": "__main__",
        }
        self._pid = os.getpid()
        self._box = BlackBox(Path(spec.folder, f"{spec.name}.box"))
        # one for each stepped run; permits may arrive before the run starts
        self._gates: dict[int, Gate] = defaultdict(Gate)
        self._current_run: int | None = None  # number of the run whose function is executing
        self._released_run = 0  # number of the latest run that the kernel has released
        self._idle = threading.Event()  # no function is executing
        #: The function's exception, kept because destroying its variables may hang.
        self._error: BaseException | None = None
        self._close_record: Callable[[], None] = lambda: None

    def start(self) -> None:
        """Set up the environment and the GPU."""
        spec = self.spec
        os.environ.clear()
        os.environ.update(spec.environ | spec.torchrun_environ)
        if spec.backend == "nccl":
            os.environ.update(NCCL)
        if os.environ.get("MPLBACKEND", INLINE) == INLINE:
            os.environ["MPLBACKEND"] = "agg"
        with suppress(OSError):
            os.chdir(spec.cwd)
        torch.set_num_threads(spec.threads)
        set_seeds()  # otherwise, all forked processes would draw the same numbers
        tap.on_gloo = spec.backend == "gloo"
        if spec.device != "cpu":
            gpu.initialize(spec)
            tap.remove()  # reinstalled around the staging, so that a receive includes its copy
            if tap.on_gloo:
                gpu.stage_messages()
            tap.on_gpu = True
            tap.install()
        self.group.intercept_init()
        self.outbox.capture()
        builtins.input = _raise_for_input
        os.register_at_fork(after_in_child=_reset_child)
        ForkingPickler.reducer_override = _reduce  # type: ignore[method-assign]

    # -- the lifeline -----------------------------------------------------------

    def handle_command(self, message: tuple[Any, ...]) -> None:
        """Handle the kernel's command: "go" with a number of permits or None, or "release"."""
        command, run, *permits = message
        if command == "go":
            self._gates[run].allow(*permits)
        elif not (self._runs_cells and self._raise_in_cell(run)):
            self._report_and_exit(run)

    def _report_and_exit(self, run: int) -> None:
        """Report the function's position and exit, unless the function has raised."""
        if self._error is not None:  # the main thread is reporting it
            return
        self._close_record()
        self.outbox.emit(
            run,
            "outcome",
            Outcome(self.spec.rank, error=describe_position(threading.main_thread().ident or 0)),
        )
        self.outbox.drain()
        os.killpg(0, signal.SIGKILL)

    def _raise_in_cell(self, run: int) -> bool:
        """Raise Released in the cell; return False if the cell does not end in time."""
        self._released_run = run
        if run != self._current_run:
            return True
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        return self._idle.wait(SIGNAL_TIMEOUT)

    @contextmanager
    def _interruptible(self, run: int) -> Iterator[None]:
        """Allow signals and the kernel to interrupt the block."""

        def on_signal(*_: Any) -> None:
            raise Released if self._released_run == run else KeyboardInterrupt(SIGINT)

        previous = signal.signal(signal.SIGINT, on_signal)
        self._current_run = run
        self._idle.clear()
        try:
            if self._released_run == run:  # released before the call
                raise Released
            yield
        finally:
            self._current_run = None
            self._idle.set()
            signal.signal(signal.SIGINT, previous)

    # -- one run ----------------------------------------------------------------

    def execute(self, payload: bytes, options: dict[str, Any]) -> None:
        """Run one pickled ``(fn, args, kwargs)`` and report the outcome; never raises."""
        emit = partial(self.outbox.emit, options["run"])
        with self.outbox.redirect_streams(options["run"]):
            outcome = self._perform(payload, options, emit)
        emit("outcome", outcome)

    def _perform(self, payload: bytes, options: dict[str, Any], emit: Emit) -> Outcome:
        outcome, run = Outcome(self.spec.rank, intact=True), options["run"]
        incarnation, self._error = options["incarnation"], None
        try:
            self.group.is_replacement = incarnation > 0
            if not (self.group.is_replacement or self._runs_cells):  # an engine has already joined
                self.group.join()
            with (
                self._recording(options, emit, outcome),
                self._interruptible(run),
                self._kvstore(options, emit),
            ):
                if options.get("seed") is not None:
                    set_seeds(rank_seed(options["seed"], self.spec.rank, incarnation))
                try:
                    value = self._call(payload, run)
                    tap.wait_for_gpu()
                except LeaveFunction as reason:
                    value, outcome.remark = None, str(reason)
                outcome.result_type = type(value).__name__
                outcome.result = (
                    memoryview(value).tobytes() if options.get("raw") else _dump_result(value)
                )
        except BaseException as error:
            self._error = error
            outcome.error = describe(
                error, released=isinstance(error, Released), hint=gpu.hint(error, self.spec)
            )
        return outcome

    def _call(self, payload: bytes, run: int) -> Any:
        """Call the function and return its result."""
        fn, args, kwargs = cloudpickle.loads(payload)
        if isinstance(fn, Cell):
            fn, args = self._run_cell, (fn,)
        if isinstance(fn, Path):
            recorder.add_user_file(str(fn))
            fn, args, kwargs = run_script, (fn, args), {}
        if not self.group.is_replacement:  # a replacement has no group
            self.group.enter(run)
        try:
            return fn(*args, **kwargs)
        finally:
            if os.getpid() != self._pid:
                _end_child()

    def _run_cell(self, cell: Cell) -> Any:
        if self.spec.rank not in cell.ranks:
            raise LeaveFunction("the cell was not run on it")
        return cell(self.namespace)

    @contextmanager
    def _kvstore(self, options: dict[str, Any], emit: Emit) -> Iterator[None]:
        """Allow the function to create a KVStore if the cluster has servers."""
        if options["node"] is None:
            yield
            return
        from distkit import kvstore

        kvstore.use(options["node"], partial(emit, "on_crash"))
        returned = False
        try:
            yield
            returned = True
        finally:
            kvstore.release(flush=returned)

    @contextmanager
    def _recording(self, options: dict[str, Any], emit: Emit, outcome: Outcome) -> Iterator[None]:
        if not options.get("record", True):
            tap.remove()
            yield
            return
        run = options["run"]
        run_recorder = Recorder(
            self.spec.rank,
            copy_to=partial(self._box.store, run),
            stepped=options.get("step", False),
        )
        flusher = Flusher(run_recorder, emit)
        self._close_record = flusher.close
        tap.call_context = self._call_context(run, emit)
        tap.groups.on_group = tap.call_context.add_group
        if run_recorder.stepped:
            gate = self._gates[run]
            gate.on_wait = run_recorder.request_flush
            tap.before.append(lambda op, nbytes: gate.wait())
        injector = FaultInjector(options["faults"], self.spec.rank)
        # only if needed, because an injector slows down every call
        tap.before += [injector] if options["faults"] != Faults() else []
        recorder.set_current(run_recorder)
        try:
            yield
            outcome.missed = injector.missed()
        finally:
            tap.before.clear()
            tap.call_context = None
            tap.record_completions()
            outcome.intact = not tap.broken
            outcome.collectives, unwaited = dict(tap.collectives), tap.unwaited.calls()
            recorder.set_current(None)
            flusher.close()
            outcome.recorded = {
                "dropped": run_recorder.dropped,
                "without_values": run_recorder.without_values,
                "unwaited": unwaited,
                "unrecorded": dict(run_recorder.unrecorded),
            }
            tap.reset()

    def _call_context(self, run: int, emit: Emit) -> CallContext:
        """Create the context that checks this run's collectives before they reach the backend."""
        spec, fingerprint = self.spec, None
        if spec.backend == "gloo" and spec.hosts == 1:  # the check needs shared memory
            fingerprint = CollectiveFingerprint(Path(spec.folder), run, spec.rank)
            # registered now, because new_group may be the first call
            fingerprint.add_group(WORLD, range(spec.world_size))
        return CallContext(emit, fingerprint, threading.Event().wait)  # blocks until the release


class Gate:
    """Semaphore that blocks a rank before each communication call until it gets a permit.

    The tap's hook waits on the gate, so pausing works for every program, including DDP's C++
    reducer. Another thread adds permits, since the main thread is blocked. The operation of a
    waiting rank is *scheduled* but not *started*; therefore,
    :class:`distkit.diagnosis.rank_state.WaitForGraph` treats the rank as paused.

    ``on_wait`` is called before a communication call waits.
    """

    def __init__(self) -> None:
        self.on_wait: Callable[[], None] = lambda: None
        self._permits: float = 0
        self._changed = threading.Condition()

    def allow(self, count: int | None) -> None:
        """Add ``count`` permits, or unlimited permits if None. May be called from any thread."""
        with self._changed:
            self._permits += float("inf") if count is None else count
            self._changed.notify_all()

    def wait(self) -> None:
        """Wait for a permit and consume it."""
        with self._changed:
            if not self._permits:
                self.on_wait()
                self._changed.wait_for(lambda: self._permits)
            self._permits -= 1


# -- programs --------------------------------------------------------------------------------------


def run_script(path: Path, argv: Iterable[str]) -> None:
    """Run a file as Python does: as ``__main__``, with its arguments."""
    sys.argv[:] = [str(path), *argv]
    sys.path.insert(0, str(path.resolve().parent))
    try:
        runpy.run_path(str(path), run_name="__main__")
    except SystemExit as error:  # scripts often end with sys.exit(main())
        if error.code not in (None, 0):
            raise


def _raise_for_input(prompt: object = "") -> str:
    raise EOFError(
        "input() is not available on a rank. Call it in the notebook, and pass the answer as an "
        "argument: cluster.run(fn, answer)."
    )


def _dump_result(value: Any) -> bytes:
    try:
        return dumps(value)
    except (Released, KeyboardInterrupt):
        raise
    except BaseException as e:
        raise NotPicklableError(
            f"the function returned an object of type {type(value).__name__} that cannot be sent "
            f"back ({type(e).__name__}: {text(e)}). "
            "Return plain data: numbers, strings, lists, dicts, tensors."
        ) from None


# -- processes that the program starts -------------------------------------------------------------
# The processes that a program starts are not ranks. They must behave like children of a plain
# Python process: multiprocessing.Pool must be able to terminate them with SIGTERM, for example.


def _end_child() -> None:
    """Exit a forked child process in which the user's function has returned or raised."""
    failed = sys.exc_info()[0] is not None
    if failed:
        traceback.print_exc()
    with suppress(Exception):
        sys.stdout.flush()
    os._exit(int(failed))


def _reduce(pickler: Any, obj: Any) -> Any:
    """Pickle functions and classes with cloudpickle, since a notebook cannot be imported."""
    if not isinstance(obj, FunctionType | type):
        return NotImplemented
    return cloudpickle.loads, (cloudpickle.dumps(obj),)


def _reset_child() -> None:
    """Reset the rank's state in a process that the program forks."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # engines install a handler
    recorder.set_current(None)
    tap.before.clear()
