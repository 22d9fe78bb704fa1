"""The outcome of a function on one rank as plain data, and the rank's end derived from it.

Exceptions are the user's objects: their ``__str__`` may raise, exit the process, or return
something other than a string.
"""

from __future__ import annotations

import re
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distkit.cluster.notebook import line_label
from distkit.cluster.processes.rank_spec import CHANNEL_CLOSED
from distkit.errors import PACKAGE_PATHS, is_generated
from distkit.recording.recorder import is_user_file
from distkit.trace.info import RankEnd

#: Maximum length of an exception's text [characters], and maximum number of frames in a traceback;
#: the innermost frames are kept.
MAX_TEXT, MAX_FRAMES = 20_000, 60

#: Maximum number of exceptions examined in a chain, and maximum number of notes per exception.
MAX_CAUSES = 10

#: Text of an exception that is the consequence of a broken connection to a peer.
CONNECTION_BROKEN = re.compile(r"Connection (closed|reset) by peer")

#: gloo's message if it received more bytes than the tensor has.
_LARGER = re.compile(r"op\.preamble\.length <= op\.nbytes\. (\d+) vs (\d+)")

#: Text of the KeyboardInterrupt for a SIGINT that distkit did not send.
SIGINT = "signal SIGINT"

#: Control characters except for tabs, newlines and colors; surrogates, which UTF-8 cannot encode.
_UNPRINTABLE = re.compile(r"(?!\x1b\[[0-9;]*m)[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff]")

#: Path prefixes of the frames that call the user's function or script.
_RANK_FILES = (str(Path(__file__).parents[1]), runpy.run_path.__code__.co_filename)

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
        result: the result, pickled, or the bytes themselves in a run with ``raw``.
        result_type: name of the result's class.
        remark: why the result is missing, if this is not an error.
        error: the exception that the function raised.
        died: how the rank's process exited, or "" if it is alive.
        died_at: time when the exit was detected, on the trace's clock [s].
        log: the end of the log of a process that exited.
        intact: whether the next cell can use the process.
        collectives: number of issued collectives, by group.
        missed: faults of :func:`distkit.inject_faults` that did not occur.
        recorded: the recorder's statistics and the unwaited calls, for the trace.
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
    """Raised in a cell that is released after another rank's failure or an interrupt."""


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


def describe_position(thread: int) -> Failure:
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
    """Return the text of a user's object, or the reason why it has none."""
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
        if not f.filename.startswith(_RANK_FILES)
    ]


# -- the end of a rank ---------------------------------------------------------------------


def exit_cause(status: int, *, expected: bool = False, log: str = "") -> str:
    """Return the cause of a process's exit.

    Args:
        status: exit status, as returned by ``os.waitstatus_to_exitcode``.
        expected: whether ``dk.inject_faults`` killed it.
        log: end of its log, which may contain gloo's reason.
    """
    if status == -signal.SIGKILL and expected:
        return "dk.inject_faults killed it, as requested"
    if status == CHANNEL_CLOSED:
        return (
            "it closed descriptors that distkit needs, as os.closerange() does, or changed modules"
        )
    cause = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
    if sizes := _LARGER.search(log):
        cause += f": gloo received {sizes[1]} bytes where {sizes[2]} were expected"
    return cause


def rank_ends(outcomes: Iterable[Outcome]) -> dict[int, RankEnd]:
    """Return how each rank ended, for the trace's ``info.ends``."""
    return {o.rank: rank_end(o) for o in outcomes}


def rank_end(outcome: Outcome) -> RankEnd:
    """Return how a rank ended."""
    if outcome.died:
        return RankEnd(
            "died",
            outcome.died,
            line_in(crash_frames(outcome.log)[::-1]),
            outcome.died_at,
        )
    error = outcome.error
    if error is None:
        return RankEnd("returned", outcome.remark)
    if error.released or error.consequence:
        return RankEnd("released")
    return RankEnd("raised", f"{error.type}: {error.text}", line_in(error.frames))


def crash_frames(log: str) -> list[Frame]:
    """Return the user's frames of the crashed thread in a log, innermost first."""
    report = log.partition("Fatal Python error")[2]
    stack = report.partition("(most recent call first):")[2].partition("\n\n")[0]
    frames = re.findall(r'File "(.+)", line (\d+) in (\S+)', stack)
    return [(file, int(line), name, None) for file, line, name in frames if is_user_file(file)]


def line_in(frames: list[Frame]) -> str:
    """Return the innermost line of user code, not of an installed package or of Cython.

    If there is none, return the innermost line of distkit's reference implementations or, failing
    that, of any code.
    """
    user_lines = sorted(
        (
            (file, number)
            for file, number, function, _ in reversed(frames)
            if file and is_user_file(file)
            if "." not in function and not is_generated(file, function)
        ),
        key=lambda line: line[0].startswith(PACKAGE_PATHS),
    )
    if not (user_lines or frames):
        return ""
    file, number = user_lines[0] if user_lines else frames[-1][:2]
    return line_label(f"{file}:{number}")
