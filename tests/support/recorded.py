"""Recorded runs, and the messages of runs and schedules in a common form for comparison."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable

import numpy as np

import distkit as dk
from distkit.algorithms.rounds import Round, chunk_sizes
from distkit.trace.trace import Trace

#: The sizes of messages, in order of sending, by sender and receiver.
Sizes = dict[tuple[int, int], list[int]]


def record_with_values(function: Callable[[], object], ranks: int) -> Trace:
    """Record runs until one has all values; a recorder may omit values on a busy machine."""
    runs = (dk.run_ranks(function, ranks).trace for _ in range(10))
    return next(trace for trace in runs if not trace.info.without_values)


def message_sizes(trace: Trace) -> Sizes:
    """Return the sizes of a run's messages [bytes]."""
    found: Sizes = defaultdict(list)
    for m in sorted(trace.messages, key=lambda m: m.send or (0, 0)):
        assert m.recv is not None, f"{m} was not received"
        found[m.src, m.dst].append(m.nbytes)
    return dict(found)


def scheduled_sizes(rounds: Iterable[Round], length: int, chunks: int) -> Sizes:
    """Return the sizes of a schedule's messages [elements]."""
    size, found = chunk_sizes(length, chunks), defaultdict(list)
    for t in rounds:
        counts = np.broadcast_to(t.count, t.src.shape)
        for src, dst, chunk, count in zip(t.src, t.dst, t.chunk, counts, strict=True):
            found[int(src), int(dst)].append(int(size[chunk : chunk + count].sum()))
    return dict(found)


def concatenate(parts: Iterable[Sizes]) -> Sizes:
    """Concatenate the message sizes of consecutive parts of a program."""
    found: Sizes = defaultdict(list)
    for part in parts:
        for link, sizes in part.items():
            found[link] += sizes
    return dict(found)


def identifying_lengths(chunks: int) -> list[int]:
    """Return tensor lengths whose chunk sizes identify the chunks.

    With up to seven chunks, these lengths identify every chunk; with more, only some.
    """
    return [0, max(chunks - 1, 0), *range(chunks, 2 * chunks, max(1, chunks // 4))]
