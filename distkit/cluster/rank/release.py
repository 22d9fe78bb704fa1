"""How a rank is held and let go from outside: the gate, and the way out of what it waits in.

The words come by a line that a thread of the rank listens to: from the kernel that started it, or
from a notebook that follows it.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from distkit.cluster.rank.wires import Wires
from distkit.recording import recorder

#: A release that a destructor has swallowed is repeated after this long [s].
AGAIN = 0.005


class Gate:
    """Holds a rank before each of its communications until it is let go.

    It stands in the tap's hook, so that every program passes it, DDP's C++ reducer included. The
    word to go on comes from another thread: the rank's main thread is the one that waits here.
    What the others see of a waiting rank is an operation that is *scheduled* and not *started*;
    :class:`distkit.diagnosis.rank_state.WaitForGraph` is the rule that makes sense of that.

    ``arrived`` is called when a communication has to wait here.
    """

    def __init__(self) -> None:
        self.arrived: Callable[[], None] = lambda: None
        self._permits: float = 0
        self._changed = threading.Condition()

    def allow(self, count: int | None) -> None:
        """Let ``count`` more through, or all there will be when None. From any thread."""
        with self._changed:
            self._permits += float("inf") if count is None else count
            self._changed.notify_all()

    def wait(self) -> None:
        """Wait for a permit and use it up."""
        with self._changed:
            if not self._permits:
                self.arrived()
                self._changed.wait_for(lambda: self._permits)
            self._permits -= 1


class Released(BaseException):
    """Raised inside a program that is ended because another rank failed, or by interrupt()."""


class Releases:
    """Obeys the words that hold this rank's function or let it go.

    Args:
        wires: the connections of its process groups.
        sever: has what is blocked in the backend raise.
    """

    def __init__(self, wires: Wires, sever: Callable[[], None]) -> None:
        self._wires, self._sever = wires, sever
        self.gates: dict[int, Gate] = defaultdict(Gate)  # of stepped runs; words may come early
        self.running: int | None = None  # number of the run whose function is executing
        self.pulled = False  # out of its function, by the starter
        self.let_go = threading.Event()  # the run that executes is released
        self._latest = 0  # the latest run that the starter wanted ended
        self._why: tuple[str, ...] = ()
        self._obeying = threading.Lock()
        self._out = threading.Event()  # no function is executing

    def obey(self, word: str, run: int, *what: Any) -> None:
        """Obey a word: "go" with a number of permits or None, "release" perhaps with the reason."""
        if word == "release":
            self._release(run, *what)
        elif word == "go":
            self.gates[run].allow(*what)

    def _release(self, run: int, *why: str) -> None:
        """Get the main thread out of whatever it waits in, or not let it begin."""
        with self._obeying:
            self._latest, self._why = run, why
            if run != self.running:
                return
            self.pulled = True
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            self.gates[run].allow(None)  # another thread may wait there
            self.let_go.set()
        self._wires.rest(self._out.wait)
        with self._obeying:
            if run == self.running:
                self._sever()

    def _pull(self) -> None:
        """Have the main thread raise, while it is in the function that is to end."""
        with self._obeying:
            if self.pulled and self.running is not None:
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    @contextmanager
    def releasable(self, run: int, otherwise: Callable[[int, Any], object]) -> Iterator[None]:
        """While inside, the function may be ended from outside; ``otherwise`` hears other SIGINTs.

        For the main thread.
        """

        def on_signal(number: int, frame: Any) -> None:
            if self.pulled and _imports_a_library(frame):
                threading.Timer(AGAIN, self._pull).start()
            elif self.pulled and self.running is not None:
                raise Released(*self._why)
            elif self.running is not None:
                otherwise(number, frame)

        before = signal.signal(signal.SIGINT, on_signal)
        self.pulled, self.running = False, run
        self._out.clear()
        try:
            if self._latest == run:  # the word was quicker than the call
                raise Released(*self._why)
            yield
        finally:
            self.running = None  # a signal from now on does nothing …
            self._out.set()
            with self._obeying:  # … and has come before the handler goes
                signal.signal(signal.SIGINT, before)

    def keep_quiet(self) -> None:
        """Print nothing that a release without a reason leads to, in destructors and threads.

        A destructor swallows the release, too: then it is repeated.
        """
        show, unraisable, in_thread = sys.excepthook, sys.unraisablehook, threading.excepthook

        def excepthook(kind: type[BaseException], error: BaseException, at: Any) -> None:
            if not issubclass(kind, Released) or error.args:  # Cython comes here before the next
                show(kind, error, at)

        def unraisablehook(what: Any) -> None:
            if issubclass(what.exc_type, Released):
                threading.Timer(AGAIN, self._pull).start()
            elif not self.pulled:
                unraisable(what)

        def threads_excepthook(what: Any) -> None:
            if not self.pulled:
                in_thread(what)

        sys.excepthook, sys.unraisablehook = excepthook, unraisablehook
        threading.excepthook = threads_excepthook


def _imports_a_library(frame: FrameType | None) -> bool:
    """True if a library is being imported: half a library would stay in this process."""
    while frame is not None and not recorder.is_users(frame.f_code.co_filename):
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False
