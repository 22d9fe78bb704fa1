"""The outcome of a function on one rank as plain data, with its exception as text.

Exceptions are the user's objects: ``__str__`` may raise, end the process or not return a string.
"""

from __future__ import annotations

import builtins
import re
import runpy
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

#: Maximum length of a text [characters] and of a traceback, which is cut in its middle [frames].
MAX_TEXT, MAX_FRAMES = 20_000, 60

#: Like ``MAX_FRAMES``, for an infinite recursion, whose frames repeat themselves.
MAX_RECURSION_FRAMES = 6

#: Maximum number of causes, notes and members of a group in a text.
MAX_CAUSES = 10

#: Text of an exception that is the consequence of a broken connection to a peer.
CONNECTION_BROKEN = re.compile(r"Connection (closed|reset) by peer")

#: Text of the KeyboardInterrupt for a SIGINT that distkit did not send.
SIGINT = "signal SIGINT"

#: Control characters except for tabs, newlines and colours; and surrogates, which have no UTF-8.
_UNPRINTABLE = re.compile(r"(?!\x1b\[[0-9;]*m)[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff]")

_GROUP: Any = getattr(builtins, "BaseExceptionGroup", ())  # from Python 3.11 on

#: Files of frames between a rank and the user's function or script.
_OWN_FILES = (str(Path(__file__).parents[1]), runpy.run_path.__code__.co_filename)

#: File, line number, function and source of a frame; without a file: number of omitted frames.
Frame = tuple[str, int, str, "str | None"]


@dataclass(frozen=True)
class Failure:
    """An exception that ended the function on a rank.

    Attributes:
        type: name of its class.
        text: its text, with its notes and the members of a group.
        frames: frames of its traceback, outermost first.
        time: time of the description [s].
        released: whether it is the consequence of the rank's release.
        cause: the exception that it was raised from, as text.
        consequence: whether it is the consequence of a broken connection to another rank.
        handled: the exception that was raised or handled when the rank was released.
    """

    type: str
    text: str = ""
    frames: list[Frame] = field(default_factory=list)
    time: float = 0.0
    released: bool = False
    cause: str | None = None
    consequence: bool = False
    handled: Failure | None = None


@dataclass
class Outcome:
    """The end of a function on a rank: it returned, it raised, or its process ended.

    Attributes:
        rank: the rank.
        result: the result, pickled.
        result_type: name of the result's class.
        remark: reason for a missing result, if the user requested it.
        error: the exception that it raised.
        died: how its process ended; "" if it is alive.
        died_at: time at which the end was noticed, on the trace's clock [s].
        log: the end of the log of a process that ended.
        tolerated: whether the others continue without it, with ``on_crash="continue"``.
        intact: whether the next cell can use the process.
        collectives: number of issued collectives, by group.
        imported: whether it has imported the module ``LATE``.
        grown: names of the notebook's containers whose copies it has extended.
        missed: faults of :func:`distkit.trouble` that did not occur.
        dropped, without_values, unwaited, unrecorded: facts from the recorder, for the trace.
    """

    rank: int
    result: bytes | None = None
    result_type: str = ""
    remark: str = ""
    error: Failure | None = None
    died: str = ""
    died_at: float | None = None
    log: str = ""
    tolerated: bool = False
    intact: bool = False
    collectives: dict[str, int] = field(default_factory=dict)
    imported: bool = False
    grown: list[str] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)
    dropped: int = 0
    without_values: int = 0
    unwaited: list[Any] = field(default_factory=list)
    unrecorded: dict[str, int] = field(default_factory=dict)

    @property
    def returned(self) -> bool:
        """True if the function returned."""
        return self.error is None and not self.died


class Released(BaseException):
    """Raised in a program that is released after another rank's failure or an interrupt."""


def describe(error: BaseException, *, released: bool) -> Failure:
    """Describe an exception; for a released rank add the exception that it was handling.

    Never raises, but hangs if the exception's methods hang.
    """
    contexts = list(_contexts(error))
    broken = any(CONNECTION_BROKEN.search(text(e)) for e in (error, *contexts))
    failure = replace(_with_cause(error, released), consequence=broken)
    return _with_handled(contexts, failure) if released or broken else failure


def released_in(thread: int) -> Failure:
    """Describe the position of a thread, as if :class:`Released` were raised there.

    Never raises, but hangs if the methods of an exception that the thread handles hang.
    """
    frame = sys._current_frames().get(thread)
    walked = [(f, line) for f, line in traceback.walk_stack(frame)][::-1]
    failure = Failure(
        "Released", frames=_trim(walked, MAX_FRAMES), time=time.monotonic(), released=True
    )
    handled: Any = sys._current_exceptions().get(thread)
    error = handled[1] if isinstance(handled, tuple) else handled  # until Python 3.11
    if error is None:
        return failure
    return _with_handled([error, *_contexts(error)], failure)


def _with_handled(errors: list[BaseException], failure: Failure) -> Failure:
    """Add the latest exception that is not a consequence of another rank's failure."""
    for error in errors:
        if not (_name(error) == "Released" or CONNECTION_BROKEN.search(text(error))):
            return replace(failure, handled=_with_cause(error, released=False))
    return failure


def _with_cause(error: BaseException, released: bool) -> Failure:
    cause = error.__cause__
    description = None if cause is None else f"{_name(cause)}: {text(cause)}"
    described_at = time.monotonic()
    return Failure(_name(error), text(error), _frames(error), described_at, released, description)


def text(error: BaseException) -> str:
    """Return the printable text of an exception, with its notes and the members of a group."""
    notes = vars(error).get("__notes__", ())
    members = error.exceptions if isinstance(error, _GROUP) else ()
    lines = [_safe_str(error), *map(_safe_str, notes[:MAX_CAUSES])]
    lines += [f"  {n}. {_name(e)}: {_safe_str(e)}" for n, e in enumerate(members[:MAX_CAUSES], 1)]
    return "\n".join(lines)


def printable(text: str) -> str:
    r"""Escape what a terminal, notebook or file may not accept; truncate a very long text.

    >>> print(printable("a\x00b"))
    a\x00b
    """
    excess = len(text) - MAX_TEXT
    if excess > 0:
        text = f"{text[:MAX_TEXT]} … ({excess} more characters)"
    return _UNPRINTABLE.sub(lambda c: f"\\x{ord(c[0]):02x}", text)


def _safe_str(value: object) -> str:
    """Return the text of a user's object, or the reason why there is none."""
    try:
        return printable(str.__str__(str(value)))
    except BaseException as e:  # its __str__ may even exit
        return f"(no text: its __str__ raised {_name(e)})"


def _name(error: BaseException) -> str:
    return printable(type(error).__name__)


def _contexts(error: BaseException) -> Iterator[BaseException]:
    """Yield the exceptions that were being handled when an error was raised, latest first."""
    seen = {id(error)}
    while len(seen) <= MAX_CAUSES:
        context = error.__context__
        if context is None or id(context) in seen:
            return
        seen.add(id(context))
        error = context
        yield error


def _frames(error: BaseException) -> list[Frame]:
    """Return the frames of an exception's traceback; omit the middle of a long one."""
    walked = [*traceback.walk_tb(error.__traceback__)]
    return _trim(walked, MAX_RECURSION_FRAMES if isinstance(error, RecursionError) else MAX_FRAMES)


def _trim(walked: list[tuple[Any, int]], limit: int) -> list[Frame]:
    """Return the user's frames; omit the middle ones if there are more than ``limit``."""
    walked = [item for item in walked if not item[0].f_code.co_filename.startswith(_OWN_FILES)]
    omitted = len(walked) - limit
    if omitted <= 0:
        return _extract(walked)
    note = f"{omitted} more frames"
    return [*_extract(walked[: limit // 2]), ("", 0, note, None), *_extract(walked[-limit // 2 :])]


def _extract(walked: list[tuple[Any, int]]) -> list[Frame]:
    summary = traceback.StackSummary.extract(iter(walked), lookup_lines=True)
    return [(f.filename, f.lineno or 0, f.name, f.line) for f in summary]
