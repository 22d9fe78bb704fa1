"""What ranks said to each other, and what a schedule says they should: in the same words."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import numpy as np

from distkit.algorithms.rounds import Round, chunk_sizes
from distkit.trace.trace import Trace

#: For each sender and receiver the sizes of the messages between them, in their order.
Said = dict[tuple[int, int], list[int]]


def said(trace: Trace) -> Said:
    """The messages of a run [bytes]."""
    found: Said = defaultdict(list)
    for m in sorted(trace.messages, key=lambda m: m.send or (0, 0)):
        assert m.recv is not None, f"nobody received {m}"
        found[m.src, m.dst].append(m.nbytes)
    return dict(found)


def drawn(rounds: Iterable[Round], length: int, chunks: int) -> Said:
    """The messages of a schedule [elements]."""
    size, found = chunk_sizes(length, chunks), defaultdict(list)
    for t in rounds:
        counts = np.broadcast_to(t.count, t.src.shape)
        for src, dst, chunk, count in zip(t.src, t.dst, t.chunk, counts, strict=True):
            found[int(src), int(dst)].append(int(size[chunk : chunk + count].sum()))
    return dict(found)


def in_turn(parts: Iterable[Said]) -> Said:
    """One run after the other."""
    found: Said = defaultdict(list)
    for part in parts:
        for link, sizes in part.items():
            found[link] += sizes
    return dict(found)


def telling(chunks: int) -> list[int]:
    """Lengths by which chunks are told apart: the first ones have an element more.

    Up to seven chunks every one is known for sure; of more every other one, or fewer.
    """
    return [0, max(chunks - 1, 0), *range(chunks, 2 * chunks, max(1, chunks // 4))]
