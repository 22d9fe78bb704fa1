"""The rank's side: what runs in each forked process.

A rank has a lifeline (a :class:`Channel` to the process that started the cluster), a process
group that it joins anew for each generation, and :func:`execute`, which runs one function.
When the lifeline breaks, the rank and everything it started are gone at once.
"""

from __future__ import annotations

import os
import random
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

from distkit.cluster.channel import Channel
from distkit.cluster.group import Group
from distkit.cluster.outbox import Outbox
from distkit.cluster.spec import Spec
from distkit.trace import recorder
from distkit.trace.blackbox import BlackBox
from distkit.trace.gate import Gate
from distkit.trace.recorder import Flusher, Recorder
from distkit.trace.tap import tap
from distkit.trace.trouble import Dropped

#: Tells the starter something about the run: a kind, and what.
Emit = Callable[[str, Any], None]


class Released(BaseException):
    """Raised inside a function that is ended because another rank failed, or by interrupt()."""


class Rank:
    """This process as a rank. There is one: ``Rank.here``."""

    here: Rank

    def __init__(self, spec: Spec, lifeline: Channel) -> None:
        Rank.here = self
        self.spec, self.lifeline, self.outbox = spec, lifeline, Outbox(lifeline)
        self.group = Group(spec)
        #: The variables of code that is sent as source; an engine's own, so that %px sees them.
        self.namespace: dict[str, Any] = {
            "torch": torch, "dist": torch.distributed, "rank": spec.rank,
            "world_size": spec.world_size, "__name__": "__main__",
        }  # fmt: skip
        self._running: int | None = None  # number of the run whose function is executing
        self._pulled = False  # out of its function, by the starter
        self._released = 0  # the latest run that the starter wanted ended
        self._obeying = threading.Lock()
        self._box = BlackBox(Path(spec.folder, f"rank-{spec.rank}.box"))
        self._gates: dict[int, Gate] = defaultdict(Gate)  # of stepped runs; words may come early

    def start(self) -> None:
        """Take on the starter's surroundings, and watch the lifeline from now on."""
        spec = self.spec
        os.environ.clear()
        os.environ.update(spec.environ)
        os.environ.update(
            RANK=str(spec.rank), LOCAL_RANK=str(spec.rank), WORLD_SIZE=str(spec.world_size),
            LOCAL_WORLD_SIZE=str(spec.world_size), DISTKIT_RANK=str(spec.rank),
            MASTER_ADDR="127.0.0.1", MASTER_PORT="0",
            OMP_NUM_THREADS=str(spec.threads),
        )  # fmt: skip
        sys.path[:] = spec.path
        with suppress(OSError):
            os.chdir(spec.cwd)
        torch.set_num_threads(spec.threads)
        random.seed()  # forked processes would all draw the same numbers
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed()
        if spec.device != "cpu" and spec.backend == "gloo":
            from distkit.cluster import staging

            staging.install()
        tap.install()
        self.group.adopt_user_calls()
        threading.Thread(target=self._watch, name="distkit-lifeline", daemon=True).start()

    # -- the lifeline -----------------------------------------------------------

    def _watch(self) -> None:
        """Obey the starter's words; end with the starter."""
        try:
            while True:
                word, run, *what = self.lifeline.recv()
                if word == "release":
                    self._release(run)
                elif word == "go":
                    self._gates[run].allow(*what)
        except EOFError:
            os.killpg(0, signal.SIGKILL)

    def _release(self, run: int) -> None:
        """Get the main thread out of whatever it waits in, or not let it begin."""
        with self._obeying:
            self._released = run
            if run != self._running:
                return
            self._pulled = True
            self.group.sever()
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            self._gates[run].allow(None)  # another thread may wait there

    @contextmanager
    def _releasable(self, run: int) -> Iterator[None]:
        """While inside, the starter may end the function from outside."""

        def on_signal(number: int, frame: Any) -> None:
            if self._running is not None:
                raise Released

        before = signal.signal(signal.SIGINT, on_signal)
        self._pulled, self._running = False, run
        try:
            if self._released == run:  # the word was quicker than the call
                raise Released
            yield
        finally:
            self._running = None  # a signal from now on does nothing …
            with self._obeying:  # … and has come before the handler goes
                signal.signal(signal.SIGINT, before)

    # -- one run ----------------------------------------------------------------

    def execute(self, payload: bytes, options: dict[str, Any]) -> None:
        """Run one pickled ``(fn, args, kwargs)`` and tell the starter how it went; never raises."""
        emit = partial(self.outbox.emit, options["run"])
        with self.outbox.printing(options["run"]):
            outcome = self._perform(payload, options, emit)
        emit("outcome", outcome)

    def _perform(self, payload: bytes, options: dict[str, Any], emit: Emit) -> dict[str, Any]:
        outcome: dict[str, Any] = {"rank": self.spec.rank}
        run = options["run"]
        try:
            if options["generation"] is None:
                self.group.stay_out()
            else:
                self.group.join(options["generation"])
            with (
                self._recording(options, emit, outcome),
                self._releasable(run),
                self._kvstore(run, options.get("life", 0), emit),
            ):
                try:
                    value = _call(payload)
                except Dropped as asked:
                    value, outcome["remark"] = None, str(asked)
                outcome["result"] = _dump_result(value)
        except BaseException as error:
            outcome["error"] = _describe(error, released=self._pulled)
        broken = self._pulled or outcome.pop("broken", False)
        outcome["intact"] = not broken and self.group.intact()
        outcome["haunted"] = self._pulled and bool(recorder.busy_threads())
        return outcome

    @contextmanager
    def _kvstore(self, run: int, life: int, emit: Emit) -> Iterator[None]:
        """In a cluster with servers: let the function create its KVStore."""
        if self.spec.node is None:
            yield
            return
        from distkit import kvstore

        node = replace(self.spec.node, run=run, life=life)
        kvstore.use(node, partial(emit, "aftermath"))
        try:
            yield
        except BaseException:
            kvstore.release(flush=False)
            raise
        kvstore.release()

    @contextmanager
    def _recording(
        self, options: dict[str, Any], emit: Emit, outcome: dict[str, Any]
    ) -> Iterator[None]:
        if not options.get("record", True):
            tap.remove()
            yield
            return
        tap.install()
        run = options["run"]
        mine = Recorder(self.spec.rank, keep=partial(self._box.note, run),
                        stepped=options.get("step", False))  # fmt: skip
        flusher = Flusher(mine, emit)
        tap.on_group = lambda name, members: emit("group", (name, members))
        if mine.stepped:
            gate = self._gates[run]
            gate.arrived = mine.hurry
            tap.before.append(lambda op, nbytes: gate.wait())
        if options.get("trouble") is not None:
            tap.before.append(options["trouble"].on(self.spec.rank))
        recorder.set_current(mine)
        try:
            yield
        finally:
            tap.before.clear()
            tap.on_group = None
            self._gates.clear()
            tap.settle()
            outcome["broken"] = tap.broken
            recorder.set_current(None)
            flusher.close()
            outcome.update(dropped=mine.dropped, without_values=mine.without_values)
            tap.forget()


def _call(payload: bytes) -> Any:
    fn, args, kwargs = cloudpickle.loads(payload)
    if isinstance(fn, Path):
        return _run_script(fn, args)
    return fn(*args, **kwargs)


def _run_script(path: Path, argv: tuple[str, ...]) -> None:
    """Run a file as torchrun does: as ``__main__``, with its arguments."""
    import runpy

    before, sys.argv = sys.argv, [str(path), *argv]
    sys.path.insert(0, str(path.parent))
    try:
        runpy.run_path(str(path), run_name="__main__")
    except SystemExit as end:  # scripts like to end with sys.exit(main())
        if end.code not in (None, 0):
            raise
    finally:
        sys.argv = before
        sys.path.remove(str(path.parent))


def _dump_result(value: Any) -> bytes:
    try:
        return bytes(cloudpickle.dumps(value))
    except Exception as e:
        raise _Unpicklable(
            f"the function returned a {type(value).__name__} that cannot travel back ({e}). "
            "Return plain data: numbers, strings, lists, dicts, tensors."
        ) from None


class _Unpicklable(TypeError):
    """Told apart by name on the other side."""


def _describe(error: BaseException, *, released: bool) -> dict[str, Any]:
    """An exception as plain data: it may not be picklable itself."""
    frames = [
        (f.filename, f.lineno, f.name, f.line)
        for f in traceback.extract_tb(error.__traceback__)
        if not f.filename.startswith(str(Path(__file__).parent))
    ]
    notes = getattr(error, "__notes__", [])
    try:
        text = "\n".join([str(error), *notes])
    except Exception as e:
        text = f"<its message cannot be shown: {e}>"
    cause = error.__cause__
    return {
        "type": type(error).__name__,
        "text": text,
        "frames": frames,
        "cause": None if cause is None else f"{type(cause).__name__}: {cause}",
        "released": released or isinstance(error, Released),
    }
