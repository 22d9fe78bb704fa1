"""The outcome of a function on one rank as plain data, with its exception as text.

Exceptions are the user's objects: ``__str__`` may raise, exit the process or not return a string.
"""

from __future__ import annotations

import re
import runpy
import sys
import time
import traceback
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

#: Maximum length of a text [characters] and of a traceback, which keeps the innermost frames.
MAX_TEXT, MAX_FRAMES = 20_000, 60

#: Maximum number of causes of an exception, and of its notes.
MAX_CAUSES = 10

#: Text of an exception that is the consequence of a broken connection to a peer.
CONNECTION_BROKEN = re.compile(r"Connection (closed|reset) by peer")

#: Text of the KeyboardInterrupt for a SIGINT that distkit did not send.
SIGINT = "signal SIGINT"

#: Control characters except for tabs, newlines and colors; surrogates, which UTF-8 cannot encode.
_UNPRINTABLE = re.compile(r"(?!\x1b\[[0-9;]*m)[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff]")

#: Files of frames between a rank and the user's function or script.
_OWN_FILES = (str(Path(__file__).parents[1]), runpy.run_path.__code__.co_filename)

#: File, line number, function and source of a frame.
Frame = tuple[str, int, str, "str | None"]


@dataclass(frozen=True)
class Failure:
    """An exception that ended the function on a rank.

    Attributes:
        type: name of its class.
        text: its text, with its notes.
        frames: frames of its traceback, outermost first.
        time: time when it was described [s].
        released: whether it is the consequence of the rank's release.
        cause: the exception that it was raised from, as text.
        consequence: whether it is the consequence of a broken connection to another rank.
    """

    type: str
    text: str = ""
    frames: list[Frame] = field(default_factory=list)
    time: float = 0.0
    released: bool = False
    cause: str | None = None
    consequence: bool = False


@dataclass
class Outcome:
    """The end of a function on a rank: it returned, it raised, or its process exited.

    Attributes:
        rank: the rank.
        result: the result, pickled.
        result_type: name of the result's class.
        remark: why the result is missing, if this is not an error.
        error: the exception that it raised.
        died: how its process exited; "" if it is alive.
        died_at: time when the exit was detected, on the trace's clock [s].
        log: the end of the log of a process that exited.
        intact: whether the next cell can use the process.
        collectives: number of issued collectives, by group.
        missed: faults of :func:`distkit.inject_faults` that did not occur.
        recorded: facts from the recorder, for the trace.
    """

    rank: int
    result: bytes | None = None
    result_type: str = ""
    remark: str = ""
    error: Failure | None = None
    died: str = ""
    died_at: float | None = None
    log: str = ""
    intact: bool = False
    collectives: dict[str, int] = field(default_factory=dict)
    missed: list[str] = field(default_factory=list)
    recorded: dict[str, Any] = field(default_factory=dict)


class Released(BaseException):
    """Raised in a program that is released after another rank's failure or an interrupt."""


def describe(error: BaseException, *, released: bool, hint: str = "") -> Failure:
    """Describe an exception; ``hint`` is added to its text.

    Never raises, but hangs if the exception's methods hang.
    """
    cause, texts, context = error.__cause__, [text(error)], error.__context__
    while context is not None and len(texts) < MAX_CAUSES:
        texts.append(text(context))
        context = context.__context__
    return Failure(
        _name(error),
        texts[0] + hint,
        _frames(traceback.extract_tb(error.__traceback__, -MAX_FRAMES)),
        time.monotonic(),
        released,
        cause=None if cause is None else f"{_name(cause)}: {text(cause)}",
        consequence=any(map(CONNECTION_BROKEN.search, texts)),
    )


def released_in(thread: int) -> Failure:
    """Describe the position of a thread, as if :class:`Released` were raised there."""
    stack = traceback.extract_stack(sys._current_frames().get(thread), MAX_FRAMES)
    return Failure("Released", frames=_frames(stack), time=time.monotonic(), released=True)


def text(error: BaseException) -> str:
    """Return the printable text of an exception, with its notes."""
    notes = vars(error).get("__notes__", ())[:MAX_CAUSES]
    return "\n".join([_safe_str(error), *map(_safe_str, notes)])


def printable(text: str) -> str:
    r"""Escape characters that terminals, notebooks or files reject, and truncate very long text.

    >>> print(printable("a\x00b"))
    a\x00b
    """
    excess = len(text) - MAX_TEXT
    if excess > 0:
        text = f"{text[:MAX_TEXT]} … ({excess} more characters)"
    return _UNPRINTABLE.sub(lambda c: f"\\x{ord(c[0]):02x}", text)


def _safe_str(value: object) -> str:
    """Return the text of a user's object, or an explanation why it has none."""
    try:
        return printable(str.__str__(str(value)))
    except BaseException as e:  # its __str__ may even exit
        return f"(no text: its __str__ raised {_name(e)})"


def _name(error: BaseException) -> str:
    return printable(type(error).__name__)


def _frames(stack: Iterable[traceback.FrameSummary]) -> list[Frame]:
    """Return the frames of the user's function and of the functions that it called."""
    return [
        (f.filename, f.lineno or 0, f.name, f.line)
        for f in stack
        if not f.filename.startswith(_OWN_FILES)
    ]
