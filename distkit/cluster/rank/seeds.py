"""Seeds the ranks' random number generators, differently on every rank and reproducibly.

Ranks are forked from one process, so by default they would all draw the same numbers. Each run has
a seed, stored in its trace (``trace.info.seed``); each rank derives its own seed from it.
"""

from __future__ import annotations

import inspect
import operator
import random
import secrets
import sys
from contextlib import suppress
from hashlib import blake2b
from typing import Any

from distkit.cluster.notebook import Cell


def for_call(fn: Any, kwargs: dict[str, Any], seed: Any) -> tuple[int | None, dict[str, Any]]:
    """Return the seed of a run, and the keyword arguments of its function.

    A function with a parameter ``seed`` receives the seed. A run without a seed draws one; a cell
    without a seed keeps the state of the ranks' generators.

    Raises:
        TypeError: the seed is not an integer.

    >>> for_call(lambda seed: None, {}, 7)
    (7, {'seed': 7})
    >>> for_call(len, {}, 7)
    (7, {})
    """
    if seed is None:
        return (None if isinstance(fn, Cell) else secrets.randbits(32)), kwargs
    with suppress(TypeError, ValueError):  # a script, or a function written in C
        if "seed" in inspect.signature(fn).parameters:
            kwargs = {**kwargs, "seed": seed}
    try:
        return operator.index(seed), kwargs
    except TypeError:
        raise TypeError(f"seed must be an integer, not {seed!r}") from None


def for_rank(seed: int, rank: int, incarnation: int = 0) -> int:
    """Return a rank's seed of 64 bits; ``incarnation`` is the number of its earlier processes.

    >>> for_rank(0, 0) == for_rank(0, 0), for_rank(0, 0) == for_rank(0, 1)
    (True, False)
    """
    return int.from_bytes(
        blake2b(f"{seed} {rank} {incarnation}".encode(), digest_size=8).digest(), "big"
    )


def set_all(seed: int | None = None) -> None:
    """Seed the generators of torch (on all devices), numpy and Python; randomly if None."""
    import torch

    seed = secrets.randbits(64) if seed is None else seed
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:  # a later import seeds it randomly
        sys.modules["numpy"].random.seed([seed & 0xFFFFFFFF, seed >> 32])
