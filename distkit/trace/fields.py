"""Checks of the fields of a saved trace: a file from outside is checked before it is used.

Each check raises a ValueError that names the field. Columns are checked as arrays, and what
events have in common once, so that a million events cost no more than their reading. Pure.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np

from distkit.events import LINES, STACK, Op, State

#: A trace has fewer ranks than this; ten times as many as the largest simulations.
MOST_RANKS = 100_000
#: Whole numbers are smaller than this: JSON and numpy agree on them.
LARGEST = 2**53
#: A tensor's summary has no more values than this.
MOST_VALUES = 65_536

#: Raises a ValueError if a value does not fit; gets the value and the field's name.
Check = Callable[[Any, str], None]


def wrong(field: str, expected: str, found: Any) -> ValueError:
    """The error of a field that holds something else."""
    return ValueError(f"field {field}: expected {expected}, found {reprlib.repr(found)}")


# -- one value ----------------------------------------------------------------------


def text(value: Any, field: str) -> None:
    """A string that can be written to a file."""
    if type(value) is not str:
        raise wrong(field, "text", value)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise wrong(field, "text without halves of characters", value) from None


def whole(value: Any, field: str, least: int = 0, below: int = LARGEST) -> None:
    """An int; a bool is none."""
    if type(value) is not int or not least <= value < below:
        raise wrong(field, f"a whole number from {least} to {below - 1}", value)


def number(value: Any, field: str) -> None:
    """A finite number."""
    if type(value) not in (int, float) or not -LARGEST < value < LARGEST:
        raise wrong(field, "a finite number", value)


rank = partial(whole, below=MOST_RANKS)


def anything(value: Any, field: str) -> None:
    """Accept any value: it is only shown."""
    if value is not None and type(value) is not bool:
        (number if type(value) in (int, float) else text)(value, field)


def word(*words: str) -> Check:
    """One of some words."""

    def check(value: Any, field: str) -> None:
        if type(value) is not str or value not in words:
            raise wrong(field, "one of " + ", ".join(words), value)

    return check


# -- several ------------------------------------------------------------------------


def items(check: Check) -> Check:
    """A list."""

    def check_items(value: Any, field: str) -> None:
        if type(value) is not list:
            raise wrong(field, "a list", value)
        for i, one in enumerate(value):
            check(one, f"{field}[{i}]")

    return check_items


def by_name(check: Check, name: Check = text) -> Check:
    """A dict whose keys are free."""

    def check_values(value: Any, field: str) -> None:
        for key, one in _dict(value, field).items():
            name(key, f"{field} (a name in it)")
            check(one, f"{field}.{reprlib.repr(key)}")

    return check_values


def record(fields: Mapping[str, Check], needed: tuple[str, ...] = ()) -> Check:
    """A dict with these keys; others are left alone."""

    def check_fields(value: Any, field: str) -> None:
        for key in needed:
            if key not in _dict(value, field):
                raise wrong(field, f"an entry {key!r}", value)
        for key, check in fields.items():
            if key in _dict(value, field):
                check(value[key], f"{field}.{key}")

    return check_fields


def _dict(value: Any, field: str) -> dict[Any, Any]:
    if type(value) is not dict:
        raise wrong(field, "names with values", value)
    return value


def _rank_name(value: Any, field: str) -> None:
    """A rank as a key of a JSON object."""
    if not (value.isascii() and value.isdecimal() and len(value) < 10):
        raise wrong(field, "a rank's number", value)
    rank(int(value), field)


def _place(value: Any, field: str) -> None:
    """The origin of dropped events: a rank, or the notebook."""
    if value != "notebook":
        _rank_name(value, field)


_by_rank = partial(by_name, name=_rank_name)
_END = record(
    {
        "how": word("returned", "raised", "died", "released", "elsewhere"),
        "text": text,
        "where": text,
        "time": number,
    },
    needed=("how",),
)
_REPLACED = record(
    {"node": rank, "name": text, "how": text, "time": number},
    needed=("node", "name", "how", "time"),
)
#: The facts of one of several generations.
_GENERATION = record(
    {
        "world_size": partial(whole, below=MOST_RANKS + 1),
        "groups": by_name(items(rank)),
        "ends": _by_rank(_END),
        "began": _by_rank(number),
        "until": number,
        "unwaited": _by_rank(items(whole)),
    }
)
#: How far a host's clock is ahead of the trace's, and how wrong that may be, if anybody knows.
_CLOCK = record({"ahead": number, "error": number}, needed=("ahead",))

#: What a record cannot tell; ``calls`` that it has lost.
_LIMIT = record({"text": text, "remedy": text, "calls": whole}, needed=("text", "remedy"))

#: What a trace's ``meta`` may hold; entries of other names are only kept.
meta = record(
    {
        "name": anything,
        "world_size": partial(whole, below=MOST_RANKS + 1),
        "backend": anything,
        "device": anything,
        "simulated": anything,
        "terms": record({"mode": text, "staleness": whole, "backup": whole}, needed=("mode",)),
        "seconds": number,
        "until": number,
        "ranks": _by_rank(by_name(anything)),
        "groups": by_name(items(rank)),
        "dropped": by_name(whole, name=_place),
        "without_values": by_name(whole, name=_place),
        "unwaited": _by_rank(items(whole)),
        "unseen": _by_rank(by_name(whole)),
        "limits": by_name(_LIMIT),
        "ends": _by_rank(_END),
        "replaced": items(_REPLACED),
        "sources": by_name(text),
        "stopped": _by_rank(text),
        "silent_since": _by_rank(number),
        "generations": items(_GENERATION),
        "clocks": by_name(_CLOCK),
    }
)


# -- events -------------------------------------------------------------------------


def _key(value: Any, field: str) -> None:
    """A key of a parameter server or a store."""
    whole(value, field, least=-LARGEST) if type(value) is int else text(value, field)


def _one_or_more(value: Any, field: str) -> None:
    """An attribute that is only shown."""
    (items(anything) if type(value) is list else anything)(value, field)


_NUMBERS = "version", "step", "steps", "ranks", "clock", "dropped", "staleness", "backup", "memory"
_WORDS = "label", "mode", "method", "optimizer", "reduction", "function", "watched", "name"
#: The attributes that are computed with, or looked up.
_known = record(
    {
        "key": _key,
        "keys": items(_key),
        "workers": items(rank),
        "late": items(whole),
        "members": items(rank),
        "checksum": text,
        "wait_for": whole,
        **dict.fromkeys(LINES, text),
        STACK: items(text),
        "device": text,
        "device_seconds": number,
        **dict.fromkeys(_NUMBERS, whole),
        **dict.fromkeys(_WORDS, text),
    }
)


def _attributes(value: Any, field: str) -> None:
    by_name(_one_or_more)(value, field)
    _known(value, field)


def _optional(check: Check) -> Check:
    return lambda value, field: None if value is None else check(value, field)


#: What many events have in common, in this order.
_LOOK: dict[str, Check] = {
    "op": word(*map(str, Op)),
    "state": word(*map(str, State)),
    "peer": _optional(rank),
    "group": text,
    "nbytes": whole,
    "shape": items(whole),
    "dtype": text,
    "tag": _optional(partial(whole, least=-LARGEST)),
    "where": text,
    "attributes": _attributes,
}


def look(*values: Any) -> None:
    """The fields that many events share."""
    for (field, check), value in zip(_LOOK.items(), values, strict=True):
        check(value, field)


def numbers(column: Any, field: str, least: int = -LARGEST, most: int = LARGEST) -> None:
    """A column of times or of whole numbers."""
    inside = (column >= least) & (column <= most)  # not so for NaN
    if not inside.all():
        raise wrong(field, f"numbers from {least} to {most}", column[np.argmin(inside)].item())


def summary(values: Any, size: Any, sampled: Any) -> None:
    """The summary of a tensor, except for its numbers."""
    if type(values) is not list or len(values) > MOST_VALUES:
        raise wrong("summary", f"a list of up to {MOST_VALUES} values", values)
    if type(size) is not int or not 0 <= size < LARGEST or type(sampled) is not bool:
        raise wrong("summary", "a size, and whether it is a sample", (size, sampled))


def matches(found: Iterable[Any]) -> None:
    """The match of an operation."""
    try:
        text("".join(found), "match")
    except TypeError:
        raise wrong("match", "texts", found) from None
