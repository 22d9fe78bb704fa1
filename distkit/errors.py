"""The exceptions of distkit.

::

    DistkitError
    ├── ClusterError            the cluster as a whole
    │   ├── StartError          it could not be started (too many ranks, a missing GPU …)
    │   └── StoppedError        it was used after stop()
    ├── RunError                one run of a function on the ranks
    │   ├── RankError           the function raised on a rank; its traceback is in the message
    │   │   └── RankDied        a rank's process exited during the run
    │   ├── DeadlockError       ranks would have waited forever; its findings explain why
    │   │   └── MismatchError   their calls do not match in size, order, root …
    │   ├── NotPicklableError   the function, an argument or a result cannot be pickled
    │   └── RunInterrupted      the run was interrupted, or its cluster was stopped
    ├── StepError               a stepper cannot carry out a command
    ├── KVStoreError            a parameter-server call failed
    ├── LayoutError             a model cannot be divided among ranks in this way
    ├── StrategyError           a strategy cannot carry out a call
    ├── TrainingError           training cannot continue, for example because a gradient is NaN
    ├── CompanionError          a companion of distkit is not installed
    ├── LaboratoryError         hosts cannot be created on this machine
    └── TraceFileError          a trace file cannot be read

``RunStopped`` is a KeyboardInterrupt and ``CommunicationWarning`` a UserWarning.

Each message states *what* happened, *where*, and the *remedy*, in a sentence or two.
"""

from __future__ import annotations

import textwrap
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

_ROOT = Path(__file__).parents[1]
#: Path prefixes of distkit and its companions. Installed packages are side by side, and their names
#: start with "distkit". In a checkout, the companions are in a separate folder.
PACKAGE_PATHS = (str(_ROOT / "distkit"), str(_ROOT / "companions"))

#: Maximum width of messages in a notebook [columns].
WIDTH = 100


class _BriefTraceback(BaseException):
    """An exception that shows the user's line instead of distkit's frames in a notebook."""

    def _render_traceback_(self) -> list[str]:
        """Return the traceback that IPython shows."""
        return brief_traceback(self)


def brief_traceback(error: BaseException) -> list[str]:
    """Return the lines that describe an error: the user's line, if known, and the message."""
    user_frames = [
        f
        for f in traceback.extract_tb(error.__traceback__)
        if not f.filename.startswith(PACKAGE_PATHS)
        and "-packages" not in f.filename
        and not is_generated(f.filename, f.name)
    ]
    name = type(error).__name__
    head = wrapped(f"{name}: {error}")
    head = f"\x1b[31m{name}\x1b[0m{head[len(name) :]}"
    return (
        [f"----> {user_frames[-1].lineno} {user_frames[-1].line}\n", head]
        if user_frames
        else [head]
    )


def wrapped(text: str) -> str:
    """Wrap lines at spaces, because JupyterLab breaks words. Indented lines are not wrapped."""
    fold = textwrap.TextWrapper(WIDTH, break_long_words=False, break_on_hyphens=False).fill
    return "\n".join(s if s.startswith(" ") else fold(s) for s in text.splitlines())


def is_generated(file: str, function: str) -> bool:
    """Return whether a frame belongs to generated code, such as a dataclass's methods."""
    return file == "<string>" and function.startswith("__")


class DistkitError(_BriefTraceback, Exception):
    """The base class of all errors that distkit raises deliberately."""


class ClusterError(DistkitError):
    """The cluster as a whole cannot carry out a call."""


class StartError(ClusterError):
    """The cluster could not be started."""


class StoppedError(ClusterError):
    """The cluster was used after ``stop()``."""


class RunError(DistkitError):
    """One run of a function on the ranks failed.

    ``run`` is the failed :class:`distkit.cluster.Run`, with its trace, or None if no run started.
    """

    run: object = None


class RankError(RunError):
    """The function raised on a rank.

    ``rank`` is the first rank that raised, ``line`` the ``file:line``, ``exception`` the type and
    text of the exception, and ``traceback`` its traceback on the rank, as text.
    """

    def __init__(
        self, message: str, *, rank: int, line: str = "", exception: str = "", traceback: str = ""
    ) -> None:
        super().__init__(message)
        self.rank, self.line, self.exception, self.traceback = rank, line, exception, traceback


class RankDied(RankError):
    """A rank's process exited during the run.

    ``line`` is the line of the crash if it was reported, otherwise the line of the last recorded
    call.
    """


class DeadlockError(RunError):
    """Ranks would have waited forever, and were stopped.

    ``findings`` explains which ranks waited, for which ranks and on which lines, with a remedy. A
    notebook shows a diagram of the waits above the message.
    """

    #: Returns the findings and the diagram as a MIME bundle; ``brief`` omits the messages.
    draw: Callable[..., dict[str, str]] = staticmethod(lambda brief=False: {})

    def __init__(self, message: str, findings: Sequence[object] = ()) -> None:
        super().__init__(message)
        self.findings = list(findings)
        self._shown = False

    def _repr_mimebundle_(self, **_: object) -> dict[str, str]:
        """Return the findings and the diagram, for ``display(error)``."""
        return self.draw() or {"text/plain": repr(self)}

    def _render_traceback_(self) -> list[str]:
        if not self._shown and (picture := self.draw(brief=True)):  # IPython calls this twice
            from IPython.display import display

            self._shown = True
            display({**picture, "text/plain": ""}, raw=True)
        return super()._render_traceback_()


class MismatchError(DeadlockError):
    """Ranks made calls that do not match, and were stopped.

    The calls differ, for example, in the operation, the tensor's size or dtype, the root or the
    order. ``findings`` describes the difference and the lines.
    """


class NotPicklableError(RunError, TypeError):
    """The function, one of its arguments or a result cannot be pickled."""


class RunInterrupted(RunError):
    """The run was interrupted, e.g. by ``cluster.interrupt()``, or its cluster was stopped."""


class StepError(DistkitError):
    """A stepper cannot carry out a command."""


class RunStopped(_BriefTraceback, KeyboardInterrupt):
    """The user pressed stop or Ctrl-C, and the run was interrupted on all ranks.

    ``run`` is the interrupted :class:`distkit.cluster.Run`, or None if no run started.
    """

    run: object = None


class CommunicationWarning(UserWarning):
    """Reports a problem that is not an error, such as a message that was never received."""


class KVStoreError(DistkitError):
    """A parameter-server call failed."""


class StrategyError(DistkitError):
    """A strategy cannot carry out a call, for example because its replicas' calls do not match."""


class TrainingError(DistkitError):
    """Training cannot continue; ``rank``, ``step`` (from 1) and ``layer`` locate the cause."""

    def __init__(self, message: str, *, rank: int = 0, step: int = 0, layer: str = "") -> None:
        super().__init__(message)
        self.rank, self.step, self.layer = rank, step, layer


class LayoutError(DistkitError, ValueError):
    """A model cannot be divided among ranks in this way."""


class CompanionError(DistkitError, ModuleNotFoundError):
    """A companion of distkit is not installed; the message explains how to install it."""


class LaboratoryError(DistkitError):
    """A laboratory of several hosts cannot be created, or cannot carry out a call."""


class TraceFileError(DistkitError, ValueError):
    """A trace file cannot be read: it is corrupt or truncated, or its version is unsupported."""
