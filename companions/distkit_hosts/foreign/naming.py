"""Which rank a file is of, by its name. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial

from distkit.trace.info import MOST_RANKS

#: What follows the rank's number: suffixes without a digit.
_SUFFIXES = re.compile(r"(\.[a-zA-Z_]+)+$")
_RANK = re.compile(r"rank[ _.=-]?(\d+)", re.IGNORECASE)
#: The rank may be the last number of a name, or one of so many.
_PLACES = 5

Way = Callable[[str], int | None]


def ranks(names: Sequence[str]) -> dict[str, int] | None:
    """The ranks in the names of files: by the first way that tells all of them apart.

    That is the number behind the word rank, the last number, or an earlier one. None if there is
    no such way. Of a single file it is the number behind rank or at the end of its name, or else 0.

    >>> ranks(["nccl_trace_rank_container-node02_5", "nccl_trace_rank_container-node07_40"])
    {'nccl_trace_rank_container-node02_5': 5, 'nccl_trace_rank_container-node07_40': 40}
    >>> ranks(["rank3_step100.json", "rank4_step100.json"])
    {'rank3_step100.json': 3, 'rank4_step100.json': 4}
    >>> ranks(["trace_3.json"]), ranks(["rocm6_kineto.json"]), ranks(["a.json", "b.json"])
    ({'trace_3.json': 3}, {'rocm6_kineto.json': 0}, None)
    """
    places = [partial(last_number, place=place) for place in range(1, _PLACES)]
    ways: list[Way] = [_behind_rank, *(places if len(names) > 1 else [_at_the_end])]
    for way in ways:
        found = {name: rank for name in names if (rank := way(name)) is not None}
        if len({*found.values()}) == len(names):
            return found
    return {names[0]: 0} if len(names) == 1 else None


def last_number(name: str, place: int = 1) -> int | None:
    """The last number of a name, or one before it, if it can be a rank."""
    numbers = re.findall(r"\d+", _SUFFIXES.sub("", name))
    return _plausible(numbers[-place]) if len(numbers) >= place else None


def _at_the_end(name: str) -> int | None:
    stem = _SUFFIXES.sub("", name)
    return last_number(name) if stem[-1:].isdecimal() else None


def _behind_rank(name: str) -> int | None:
    numbers = _RANK.findall(_SUFFIXES.sub("", name))
    return _plausible(numbers[-1]) if numbers else None


def _plausible(number: str) -> int | None:
    return int(number) if len(number) < 10 and int(number) < MOST_RANKS else None
