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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle
import torch

from distkit.cluster.channel import Channel
from distkit.cluster.group import Group
from distkit.cluster.spec import Spec
from distkit.trace import recorder
from distkit.trace.recorder import Flusher, Recorder
from distkit.trace.tap import tap

#: What the rank hands on while a function runs: ("rows", …) or ("text", …).
Emit = Callable[[str, Any], None]


class Released(BaseException):
    """Raised inside a function that is ended because another rank failed, or by interrupt()."""


class Rank:
    """This process as a rank. There is one: ``Rank.here``."""

    here: Rank

    def __init__(self, spec: Spec, lifeline: Channel) -> None:
        Rank.here = self
        self.spec, self.lifeline = spec, lifeline
        self.group = Group(spec)
        self._running: int | None = None  # number of the run whose function is executing
        self._pulled = False  # out of its function, by the starter

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
                word, run = self.lifeline.recv()
                if word == "release" and run == self._running:
                    self._release(run)
        except EOFError:
            os.killpg(0, signal.SIGKILL)

    def _release(self, run: int) -> None:
        """Get the main thread out of whatever it waits in."""
        self._pulled = True
        self.group.sever()
        if self._running == run:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    @contextmanager
    def _releasable(self, run: int) -> Iterator[None]:
        """While inside, the starter may end the function from outside."""

        def on_signal(number: int, frame: Any) -> None:
            if self._running is not None:
                raise Released

        before = signal.signal(signal.SIGINT, on_signal)
        self._pulled, self._running = False, run
        try:
            yield
        finally:
            self._running = None
            signal.signal(signal.SIGINT, before)

    # -- one run ----------------------------------------------------------------

    def execute(self, payload: bytes, options: dict[str, Any], emit: Emit) -> dict[str, Any]:
        """Run one pickled ``(fn, args, kwargs)`` and describe how it went; never raises."""
        outcome: dict[str, Any] = {"rank": self.spec.rank}
        run = options["run"]
        try:
            self.group.join(options["generation"])
            with (
                self._recording(options["record"], emit, outcome),
                self._releasable(run),
                self._kvstore(run),
            ):
                outcome["result"] = _dump_result(_call(payload))
        except BaseException as error:
            outcome["error"] = _describe(error, released=self._pulled)
        outcome["intact"] = not self._pulled and self.group.intact()
        return outcome

    @contextmanager
    def _kvstore(self, run: int) -> Iterator[None]:
        """In a cluster with servers: let the function create its KVStore."""
        if self.spec.node is None:
            yield
            return
        from distkit import kvstore

        kvstore.use(replace(self.spec.node, run=run))
        try:
            yield
        except BaseException:
            kvstore.release(flush=False)
            raise
        kvstore.release()

    @contextmanager
    def _recording(self, wanted: bool, emit: Emit, outcome: dict[str, Any]) -> Iterator[None]:
        if not wanted:
            tap.remove()
            yield
            return
        tap.install()
        mine = Recorder(self.spec.rank)
        flusher = Flusher(mine, lambda *rows: emit("rows", rows))
        recorder.set_current(mine)
        try:
            yield
        finally:
            tap.settle()
            recorder.set_current(None)
            flusher.close()
            outcome.update(dropped=mine.dropped, without_values=mine.without_values)
            outcome["groups"] = tap.groups()
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

