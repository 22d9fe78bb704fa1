"""What became of a function on one rank, as plain data; an exception, whatever it does.

Exceptions are the user's objects: making their text may raise, end the process or give none.
"""

from __future__ import annotations

import builtins
import re
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from distkit.shadowing import explain

#: A longer text is cut [characters]; of a longer traceback the ends are told [frames].
LONGEST, DEEPEST = 20_000, 60

#: As ``DEEPEST``, for a recursion without end: its frames repeat themselves.
RECURSION = 6

#: How many causes, notes and members of a group are told.
MOST = 10

#: How a rank fails only because its peer's connection broke.
BROKEN = re.compile(r"Connection (closed|reset) by peer")

#: The text of the KeyboardInterrupt that a SIGINT raises which is none of distkit's.
SIGINT = "signal SIGINT"

#: Control characters, but for those of tabs, new lines and colours; surrogates cannot travel.
_UNPRINTABLE = re.compile(r"(?!\x1b\[[0-9;]*m)[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff]")

_GROUP: Any = getattr(builtins, "BaseExceptionGroup", ())  # from Python 3.11 on

_MACHINERY = str(Path(__file__).parents[1])

#: File, line number, function and source of a frame; without a file: what was left out.
Frame = tuple[str, int, str, "str | None"]


@dataclass(frozen=True)
class Failure:
    """An exception that ended the function on a rank.

    Attributes:
        type: the name of its class.
        text: what it says, with its notes and the members of a group.
        frames: of its traceback, the outermost first.
        time: when it was described [s].
        released: it comes of the rank's having been pulled out of the function.
        cause: the exception that it was raised from, in words.
        consequence: it comes of a broken connection to another rank.
        handled: the exception that was under way, or caught, when the rank was released.
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
        rank: which.
        result: what it returned, pickled.
        result_type: the name of its class.
        remark: why there is no result, if that was asked for.
        error: what it raised.
        died: how its process ended; "" if it goes on.
        died_at: when that was noticed, in the trace's time [s].
        log: the last of what the process wrote, where it ended.
        tolerated: the others go on without it, as the store's ``on_crash="continue"`` says.
        intact: the next cell can use the process.
        collectives: how many it has issued, by group.
        imported: it has imported what programs import late.
        grown: containers of the notebook whose copies it has filled.
        missed: what :func:`distkit.trouble` was to do and did not.
        dropped, without_values, unwaited, unseen: of the recorder, for the trace.
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
    unseen: dict[str, int] = field(default_factory=dict)

    @property
    def returned(self) -> bool:
        """True if the function came to its end."""
        return self.error is None and not self.died


class Released(BaseException):
    """Raised inside a program that is ended because another rank failed, or by interrupt()."""


def outline(error: BaseException, *, released: bool) -> Failure:
    """The part of an exception that needs no code of its class.

    ``released`` says that it comes of having been pulled out of the function.
    """
    frames = _frames(error)
    return Failure(_name(error), frames=frames, time=time.monotonic(), released=released)


def describe(error: BaseException, *, released: bool) -> Failure:
    """All that is to be told of an exception; of a released one, what the rank was leaving for.

    Never raises; if the exception's own methods hang, it hangs.
    """
    before = list(_before(error))
    broken = any(BROKEN.search(text(e)) for e in (error, *before))
    told = replace(_alone(error, released), consequence=broken)
    return _after(before, told) if released or broken else told


def released_in(thread: int) -> Failure:
    """Where a thread is, as if :class:`Released` were raised there.

    Never raises; if the methods of an exception that it handles hang, it hangs.
    """
    frame = sys._current_frames().get(thread)
    walked = [(one, line) for one, line in traceback.walk_stack(frame)][::-1]
    told = Failure("Released", frames=_ends(walked, DEEPEST), time=time.monotonic(), released=True)
    handled: Any = sys._current_exceptions().get(thread)
    error = handled[1] if isinstance(handled, tuple) else handled  # until Python 3.11
    if error is None:
        return told
    return _after([error, *_before(error)], told)


def _after(before: list[BaseException], told: Failure) -> Failure:
    """A failure with the latest of the exceptions before it that is the rank's own."""
    for error in before:
        if not (_name(error) == "Released" or BROKEN.search(text(error))):
            return replace(told, handled=_alone(error, released=False))
    return told


def _alone(error: BaseException, released: bool) -> Failure:
    cause = error.__cause__
    told = None if cause is None else f"{_name(cause)}: {text(cause)}"
    return replace(outline(error, released=released), text=text(error), cause=told)


def text(error: BaseException) -> str:
    """The text of an exception, with its notes and the members of a group, fit to be shown."""
    notes = vars(error).get("__notes__", ())
    members = error.exceptions if isinstance(error, _GROUP) else ()
    said = [_said(error), *map(_said, notes[:MOST]), *filter(None, [explain(error)])]
    said += [f"  {n}. {_name(e)}: {_said(e)}" for n, e in enumerate(members[:MOST], 1)]
    return "\n".join(said)


def printable(said: str) -> str:
    r"""A text that any terminal, notebook and file takes, cut if it is very long.

    >>> print(printable("a\x00b"))
    a\x00b
    """
    over = len(said) - LONGEST
    if over > 0:
        said = f"{said[:LONGEST]} … ({over} more characters)"
    return _UNPRINTABLE.sub(lambda c: f"\\x{ord(c[0]):02x}", said)


def _said(thing: object) -> str:
    """The text that code of the user's gives, or why there is none."""
    try:
        return printable(str.__str__(str(thing)))
    except BaseException as e:  # it may well exit
        return f"(its text cannot be shown: {_name(e)} while it was made)"


def _name(error: BaseException) -> str:
    return printable(type(error).__name__)


def _before(error: BaseException) -> Iterator[BaseException]:
    """The exceptions that were being handled when this was raised, the latest first."""
    seen = {id(error)}
    while len(seen) <= MOST:
        before = error.__context__
        if before is None or id(before) in seen:
            return
        seen.add(id(before))
        error = before
        yield error


def _frames(error: BaseException) -> list[Frame]:
    """The ends of its traceback, if all of it is long."""
    walked = [*traceback.walk_tb(error.__traceback__)]
    return _ends(walked, RECURSION if isinstance(error, RecursionError) else DEEPEST)


def _ends(walked: list[tuple[Any, int]], most: int) -> list[Frame]:
    """The user's frames, without those in the middle where there are more than ``most``."""
    walked = [one for one in walked if not one[0].f_code.co_filename.startswith(_MACHINERY)]
    left_out = len(walked) - most
    if left_out <= 0:
        return _read(walked)
    said = f"{left_out} more frames"
    return [*_read(walked[: most // 2]), ("", 0, said, None), *_read(walked[-most // 2 :])]


def _read(walked: list[tuple[Any, int]]) -> list[Frame]:
    summary = traceback.StackSummary.extract(iter(walked), lookup_lines=True)
    return [(f.filename, f.lineno or 0, f.name, f.line) for f in summary]
