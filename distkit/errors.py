"""Every error that distkit raises on purpose, in one tree.

::

    DistkitError
    ├── ClusterError            the cluster as a whole
    │   ├── StartError          it could not be started (too many ranks, no such GPU, a folder…)
    │   └── StoppedError        it was used after stop()
    ├── RunError                one run of a function on the ranks
    │   ├── RankError           the function raised on a rank: its traceback is in the message
    │   ├── RankDied            a rank's process ended in the middle of the run
    │   ├── DeadlockError       ranks waited for each other for ever: its findings say why
    │   │   └── MismatchError   what they called does not fit together: another size, order, root …
    │   ├── NotPicklableError   the function, an argument or a result cannot travel
    │   └── RunInterrupted      the run was interrupted by cluster.interrupt() or the stop button
    ├── StepError               a stepper cannot do what was asked
    ├── KVStoreError            a parameter-server call that cannot be served
    ├── LayoutError             ranks that cannot share a model in this way
    ├── StrategyError           a strategy's replicas cannot do this together
    ├── TrainingError           training cannot go on: a gradient is NaN, for example
    ├── CompanionError          a companion of distkit that is not installed
    ├── LaboratoryError         hosts that this machine cannot give a laboratory
    └── TraceFileError          a trace file that cannot be read

Beside them are ``RunStopped``, a KeyboardInterrupt, and ``CommunicationWarning``.

Each message is a sentence or two: *what* happened, *where*, and the *remedy*.
"""

from __future__ import annotations

import textwrap
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

_ROOT = Path(__file__).parents[1]
#: What the files of distkit and of its companions begin with. Installed, all are side by side, and
#: the companions' names begin with distkit's; a checkout has the companions in a folder.
OWN = (str(_ROOT / "distkit"), str(_ROOT / "companions"))

#: In a notebook, errors are at most this wide [columns].
WIDTH = 100


class _Brief(BaseException):
    """In a notebook it shows its message and the reader's line, not the way through distkit."""

    def _render_traceback_(self) -> list[str]:
        """The traceback that IPython shows."""
        frames = traceback.extract_tb(self.__traceback__)
        theirs = [
            f
            for f in frames
            if not f.filename.startswith(OWN)
            and "-packages" not in f.filename
            and not is_generated(f.filename, f.name)
        ]
        name = type(self).__name__
        head = "\n".join(map(_wrap, f"{name}: {self}".splitlines()))
        head = f"\x1b[31m{name}\x1b[0m{head[len(name) :]}"
        return [f"----> {theirs[-1].lineno} {theirs[-1].line}\n", head] if theirs else [head]


def _wrap(line: str) -> str:
    """Break a line at spaces, since JupyterLab breaks long ones within words; code stays whole."""
    if line.startswith(" "):
        return line
    wrapped = textwrap.wrap(line, WIDTH, break_long_words=False, break_on_hyphens=False)
    return "\n".join(wrapped)


def is_generated(file: str, function: str) -> bool:
    """True if a frame is of code that Python wrote and nobody can read: a dataclass's methods."""
    return file == "<string>" and function.startswith("__")


class DistkitError(_Brief, Exception):
    """Base class of every error that distkit raises on purpose."""


class ClusterError(DistkitError):
    """The cluster as a whole cannot do what was asked."""


class StartError(ClusterError):
    """The cluster could not be started."""


class StoppedError(ClusterError):
    """The cluster was used after ``stop()``."""


class RunError(DistkitError):
    """One run of a function on the ranks did not end well.

    ``run`` is the :class:`distkit.cluster.Run` as far as it came: its trace, and the
    results of the ranks that did finish.
    """

    run: object = None


class RankError(RunError):
    """The function raised on a rank.

    ``rank`` is the first rank that raised, ``line`` its ``file:line``,
    ``traceback`` the remote traceback as text.
    """

    def __init__(self, message: str, *, rank: int, line: str = "", traceback: str = "") -> None:
        super().__init__(message)
        self.rank, self.line, self.traceback = rank, line, traceback

    def __reduce__(self) -> tuple[object, ...]:
        facts = {"rank": self.rank, "line": self.line, "traceback": self.traceback}
        return partial(type(self), **facts), (str(self),)  # type: ignore[arg-type]


class RankDied(RankError):
    """A rank's process ended in the middle of the run.

    ``line`` is where it crashed, if it left a report; else that of its last recorded call, after
    which it ended.
    """


class DeadlockError(RunError):
    """Ranks waited for each other for ever, and were released.

    ``findings`` says who waited for whom, where, and what to do about it. In a notebook a picture
    of that stands above the message.
    """

    #: Makes the picture, for every kind of front end; empty if there is none.
    draw: Callable[[], dict[str, str]] = dict

    def __init__(self, message: str, findings: Sequence[object] = ()) -> None:
        super().__init__(message)
        self.findings = list(findings)
        self._shown = False

    def _repr_mimebundle_(self, **_: object) -> dict[str, str]:
        """The picture alone, as ``display(error)`` shows it."""
        return self.draw() or {"text/plain": repr(self)}

    def _render_traceback_(self) -> list[str]:
        if not self._shown and (picture := self.draw()):  # a kernel asks twice
            from IPython.display import display

            self._shown = True
            display({**picture, "text/plain": ""}, raw=True)
        return super()._render_traceback_()


class MismatchError(DeadlockError):
    """Ranks called collectives that do not fit together, and would not have come to an end.

    They differ in the operation, the tensor's size or dtype, the root or the order: ``findings``
    says in what, and where.
    """


class NotPicklableError(RunError, TypeError):
    """The function, one of its arguments or a result cannot travel between processes."""


class RunInterrupted(RunError):
    """The run was interrupted; the cluster is ready for the next one."""


class StepError(DistkitError):
    """A stepper cannot do what was asked."""


class RunStopped(_Brief, KeyboardInterrupt):
    """Somebody pressed stop, or Ctrl-C: the run was interrupted on all ranks.

    ``run`` is the :class:`distkit.cluster.Run` as far as it came.
    """

    run: object = None


class CommunicationWarning(UserWarning):
    """The run finished, but its communication was inconsistent."""


class KVStoreError(DistkitError):
    """A parameter-server call that cannot be served."""


class StrategyError(DistkitError):
    """A strategy's replicas cannot do this together."""


class TrainingError(DistkitError):
    """Training cannot go on: ``rank``, ``step`` (from 1) and ``layer`` are those of the cause."""

    def __init__(self, message: str, *, rank: int = 0, step: int = 0, layer: str = "") -> None:
        super().__init__(message)
        self.rank, self.step, self.layer = rank, step, layer


class LayoutError(DistkitError, ValueError):
    """Ranks that cannot share a model in this way."""


class CompanionError(DistkitError, ModuleNotFoundError):
    """A companion of distkit is not installed; the message says how to install it."""


class LaboratoryError(DistkitError):
    """A laboratory of several hosts that cannot be made, or cannot do what was asked."""


class TraceFileError(DistkitError, ValueError):
    """A trace file that cannot be read: corrupt, truncated, or of a newer distkit."""
