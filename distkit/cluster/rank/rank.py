"""The rank's side: what runs in each forked process.

A rank has a lifeline (a :class:`Channel` to the process that started the cluster), a process
group that it joins anew for each generation, and :func:`execute`, which runs one function.
When the lifeline breaks, the rank and everything it started are gone at once.
"""

from __future__ import annotations

import builtins
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import torch

from distkit.cluster.notebook import Cell
from distkit.cluster.pickling import captured, dumps
from distkit.cluster.processes.channel import Channel
from distkit.cluster.processes.rank_spec import Spec
from distkit.cluster.rank import gpu, interpreter, seeds
from distkit.cluster.rank.outbox import Outbox
from distkit.cluster.rank.process_group import NCCL, Group
from distkit.cluster.rank.release import Released, Releases
from distkit.cluster.rank.settings import Settings, outside_of_loops
from distkit.cluster.runs.outcome import SIGINT, Failure, Outcome, describe, outline, text
from distkit.events import P2P, WORLD
from distkit.recording import recorder
from distkit.recording.blackbox import BlackBox
from distkit.recording.recorder import Flusher, Recorder
from distkit.recording.tap import tap
from distkit.recording.trouble import Dropped, OnRank
from distkit.recording.witness import RollCall, Witness, enter_together

#: The notebook's backend for matplotlib, and the one that takes its place on ranks.
INLINE, FIGURES = "module://matplotlib_inline.backend_inline", "distkit.cluster.rank.figures"

#: Tells the starter something about the run: a kind, and what.
Emit = Callable[[str, Any], None]


class Rank:
    """This process as a rank. There is one: ``Rank.here``."""

    here: Rank

    def __init__(self, spec: Spec, lifeline: Channel) -> None:
        Rank.here = self
        self.spec, self.lifeline, self.outbox = spec, lifeline, Outbox(lifeline)
        self.group = Group(spec)
        #: The variables of code that is sent as source; an engine's own, so that %px sees them.
        self.namespace: dict[str, Any] = {
            "torch": torch,
            "dist": torch.distributed,
            "rank": spec.rank,
            "world_size": spec.world_size,
            "__name__": "__main__",
        }
        self._pid, self._in_cell = os.getpid(), False
        self.releases = Releases(self.group.wires, self.group.sever)
        self._shown = 0  # figures of this run
        self._talking: set[int] = set()  # threads that have communicated in this run
        self._box_file = Path(spec.folder, f"rank-{spec.rank}.box")
        self._box = BlackBox(self._box_file)

    def start(self) -> None:
        """Take on the starter's surroundings, and watch the lifeline from now on."""
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
        if spec.device != "cpu":
            gpu.take(spec)
        if spec.device != "cpu" and spec.backend == "gloo":
            tap.remove()  # it is to be outside: a receive is over when its copy has come back
            gpu.stage_messages()
        tap.on_gloo, tap.on_gpu = spec.backend == "gloo", spec.device != "cpu"
        if tap.on_gpu:
            tap.remove()
            tap.install()
        self.group.adopt_user_calls()
        self.outbox.capture(f"{spec.folder}/rank-{spec.rank}.out")
        builtins.input = _no_keyboard
        interpreter.look_after_children(self._forget)
        self.releases.keep_quiet()
        interpreter.explain_launchers(spec.rank)
        self.modules = interpreter.Modules()
        threading.Thread(target=self._watch, name="distkit-lifeline", daemon=True).start()

    def _forget(self) -> None:
        """In a child process: this is no rank any more."""
        self.lifeline.close_here()
        self.group.leave_user_calls()

    # -- the lifeline -----------------------------------------------------------

    def _watch(self) -> None:
        """Obey the starter's words; end with the starter."""
        try:
            while True:
                self.releases.obey(*self.lifeline.recv())
        except EOFError:
            os.killpg(0, signal.SIGKILL)

    # -- one run ----------------------------------------------------------------

    def show(self, picture: bytes) -> int:
        """Have the notebook show a PNG picture; returns how many this run has shown."""
        self._shown += 1
        if self.releases.running is not None and self._shown <= sys.modules[FIGURES].MOST:
            self.outbox.emit(self.releases.running, "figure", picture)
        return self._shown

    def execute(self, payload: bytes, options: dict[str, Any]) -> None:
        """Run one pickled ``(fn, args, kwargs)`` and tell the starter how it went; never raises."""
        emit = partial(self.outbox.emit, options["run"])
        emit("begun", None)
        with self.outbox.printing(options["run"]):
            outcome = self._perform(payload, options, emit)
        emit("outcome", outcome)

    def _perform(self, payload: bytes, options: dict[str, Any], emit: Emit) -> Outcome:
        outcome, run = Outcome(self.spec.rank, intact=True), options["run"]
        self._talking, self._shown = set(), 0
        try:
            if options["generation"] is None:
                self.group.stay_out()
            else:
                self.group.join(options["generation"])
                self.group.begin_keys(f"run {run}")
            with (
                interpreter.not_interactive(),
                self.modules.fresh(),
                ExitStack() as after,
                self._recording(options, emit, outcome),
                self._undoing(outcome) as settings,
                self.releases.releasable(run, _interrupted),
                outside_of_loops(),
                self._kvstore(run, options.get("life", 0), emit),
            ):
                if options.get("seed") is not None:
                    mine = seeds.of_rank(options["seed"], self.spec.rank, options.get("life", 0))
                    seeds.set_all(mine)
                try:
                    value, outcome.grown = self._call(payload, after, settings)
                    tap.rest()
                    if FIGURES in sys.modules:
                        sys.modules[FIGURES].show()
                except Dropped as asked:
                    value, outcome.remark = None, str(asked)
                outcome.result_type = type(value).__name__
                raw = options.get("raw", False)
                outcome.result = memoryview(value).tobytes() if raw else _dump_result(value)
        except BaseException as error:
            outcome.error = self._tell(error, emit)
            outcome.gpu_ruined = gpu.is_ruined(error)
        gpu.forget_messages()
        outcome.intact = outcome.intact and not self.releases.pulled and self.group.intact()
        outcome.groups_made = self.group.made()
        outcome.zombie_threads = any(
            self.releases.pulled or t.ident in self._talking for t in recorder.busy_threads()
        )
        return outcome

    def _tell(self, error: BaseException, emit: Emit) -> Failure:
        """Describe an exception; tell the starter what is known of it as soon as it is."""
        released = self.releases.pulled or issubclass(type(error), Released)
        emit("failing", outline(error, released=released))  # to say more may not end well
        told = describe(error, released=released)
        said = told.text + interpreter.hint(error) + gpu.hint(error, self.spec)
        told = replace(told, text=said, frames=told.frames or interpreter.called(error))
        emit("failing", told)  # nor may the end of its variables
        return told

    def _call(self, payload: bytes, after: ExitStack, settings: Settings) -> tuple[Any, list[str]]:
        """The function's result, and the copies of the notebook's containers that it has filled.

        The latter only if it returns nothing: then they are lost.
        """
        fn, args, kwargs = cloudpickle.loads(payload)
        self._in_cell = isinstance(fn, Cell)
        if isinstance(fn, Cell):
            fn, args = self._run_cell, (fn,)
        if isinstance(fn, Path):
            recorder.make_users(str(fn))
            after.enter_context(interpreter.own_main())
            fn, args, kwargs = interpreter.run_script, (fn, args), {}
        held = {name: (one, len(one)) for name, one in captured(fn, args, kwargs)}
        if self.group.generation >= 0:  # who takes a dead one's place comes alone
            self._enter(self.releases.running or 0)
        try:
            value = fn(*args, **kwargs)
        finally:
            sys.settrace(None)  # a call that is traced is the user's again
            settings.restore(cell=self._in_cell)
            if os.getpid() != self._pid:
                _end_child()
        return value, [n for n, (one, size) in held.items() if value is None and len(one) > size]

    def _enter(self, run: int) -> None:
        """Wait for the others, so that the record does not begin with the ranks' skew."""
        spec = self.spec
        if spec.hosts == 1:
            enter_together(Path(spec.folder), run, spec.rank, spec.world_size)
        else:
            self.group.enter(run)

    def _run_cell(self, cell: Cell) -> Any:
        if self.spec.rank not in cell.ranks:
            raise Dropped("the cell was not run on it")
        self.group.keep()  # as all that a cell makes
        self.modules.go_on()
        return cell(self.namespace)

    @contextmanager
    def _undoing(self, outcome: Outcome) -> Iterator[Settings]:
        """Undo what the function changes in its process; tell what cannot be undone."""
        settings, self._in_cell = Settings(), False
        try:
            yield settings
        finally:
            outcome.unrestored = settings.restore(cell=self._in_cell)

    @contextmanager
    def _kvstore(self, run: int, life: int, emit: Emit) -> Iterator[None]:
        """In a cluster with servers: let the function create its KVStore."""
        if self.spec.node is None:
            yield
            return
        from distkit import kvstore

        node = replace(self.spec.node, run=run, life=life)
        kvstore.use(node, partial(emit, "on_crash"))
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
        flusher = Flusher(
            mine, emit if self.spec.hosts == 1 else self._looking_at_the_network(emit)
        )
        witness = tap.witness = self._witness(run, emit)

        def on_group(name: str, members: list[int]) -> None:
            emit("group", (name, members))
            witness.meet(name, members)

        tap.groups.on_group = on_group
        tap.on_threads = partial(emit, "threads")
        if mine.stepped:
            gate = self.releases.gates[run]
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
            witness.close()
            self.releases.gates.clear()
            tap.settle()
            self.group.busy = [work for work, op in tap.open if op not in P2P]
            self.group.released = self.releases.pulled
            outcome.intact = not (tap.broken or tap.open)
            outcome.unwaited, outcome.collectives = tap.unwaited.calls(), dict(tap.collectives)
            self._talking = set(tap.threads)
            recorder.set_current(None)
            flusher.close()
            outcome.dropped, outcome.without_values = mine.dropped, mine.without_values
            outcome.unseen = dict(mine.unseen)
            tap.forget()

    def _looking_at_the_network(self, emit: Emit) -> Emit:
        """Tell also which machines this rank does not reach, when that changes."""
        known = list[str]()

        def emit_more(kind: str, what: Any) -> None:
            nonlocal known
            emit(kind, what)
            if kind in ("rows", "waits") and (now := self.group.wires.unreached()) != known:
                known = now
                emit("unreached", now)

        return emit_more

    def _witness(self, run: int, emit: Emit) -> Witness:
        """Whoever looks at this run's collectives before they go to the backend."""
        spec, rollcall = self.spec, None
        if spec.backend == "gloo" and spec.hosts == 1:  # it is in memory that all ranks see
            rollcall = RollCall(Path(spec.folder), run, spec.rank)
        self.releases.let_go.clear()
        witness = Witness(emit, rollcall, self.releases.let_go.wait)
        witness.meet(WORLD, list(range(spec.world_size)))  # new_group may be the first call
        return witness


def _interrupted(*_: Any) -> None:
    raise KeyboardInterrupt(SIGINT)


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
