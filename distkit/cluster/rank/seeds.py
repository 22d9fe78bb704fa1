"""Random numbers on the ranks: every rank has its own, and a run can be repeated.

Ranks are forked from one process, so without this they would all draw the same numbers. Each
run begins from a seed, which its trace tells (``trace.info.seed``); each rank derives its own.
"""

from __future__ import annotations

import inspect
import operator
import random
import secrets
import sys
from hashlib import blake2b
from typing import Any

from distkit.cluster.notebook import Cell


def of_call(fn: Any, kwargs: dict[str, Any], seed: Any) -> tuple[int | None, dict[str, Any]]:
    """The seed of a run, and the keyword arguments of its function.

    A function with a parameter ``seed`` is given it as well. A run that was given none draws
    one; a cell, which continues the cell before it, keeps the ranks' generators as they are.

    Raises:
        TypeError: the seed is no whole number.

    >>> of_call(lambda seed: None, {}, 7)
    (7, {'seed': 7})
    >>> of_call(len, {}, 7)
    (7, {})
    """
    if seed is None:
        return (None if isinstance(fn, Cell) else secrets.randbits(32)), kwargs
    if _takes_seed(fn):
        kwargs = {**kwargs, "seed": seed}
    try:
        return operator.index(seed), kwargs
    except TypeError:
        raise TypeError(f"seed must be a whole number, not {seed!r}") from None


def _takes_seed(fn: Any) -> bool:
    try:
        parameters = inspect.signature(fn).parameters
    except (TypeError, ValueError):  # a script, or a function written in C
        return False
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return True
    return "seed" in parameters and parameters["seed"].kind is not inspect.Parameter.POSITIONAL_ONLY


def of_rank(seed: int, rank: int, life: int = 0) -> int:
    """A rank's own seed, of 64 bits; ``life`` counts the ranks that had its place before.

    >>> of_rank(0, 0) == of_rank(0, 0), of_rank(0, 0) == of_rank(0, 1)
    (True, False)
    """
    return int.from_bytes(blake2b(f"{seed} {rank} {life}".encode(), digest_size=8).digest(), "big")


def set_all(seed: int | None = None) -> None:
    """Seed torch's generators (each device's), numpy's and Python's; unpredictably when None."""
    import torch

    seed = secrets.randbits(64) if seed is None else seed
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:  # one that is imported later begins unpredictably
        sys.modules["numpy"].random.seed([seed & 0xFFFFFFFF, seed >> 32])
