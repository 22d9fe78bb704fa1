"""Comparison of two recorded trainings: finds the first different loss, gradient or weight.

Pure: it reads what :func:`distkit.watch_gradients` has recorded, in runs or in saved traces.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Protocol, TypeVar

from distkit._format import count
from distkit.events import Summary
from distkit.trace.log import EventLog
from distkit.trace.training import ByRank, Training, mean_loss, read

#: Relative tolerance for sums in a different order, by dtype.
TOLERANCES = {"float64": 1e-9, "float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}

#: Relative tolerance for weights that the optimizers of both trainings round twice, by dtype.
ROUNDING = {"float64": 2**-51, "float32": 2**-22, "float16": 2**-9, "bfloat16": 2**-6}

#: A gradient that cancels to zero, such as a bias before batch norm, keeps the rounding errors of
#: the cancelled values. Gradients below this fraction of the step's largest value are compared
#: relative to that fraction.
CANCELLED = 0.1

T = TypeVar("T")


class HasTrace(Protocol):
    """An object with a trace, such as a run."""

    @property
    def trace(self) -> EventLog:
        """The events."""


@dataclass(frozen=True)
class Difference:
    """A loss, gradient or weight that differs in two runs.

    ``step`` counts from 1, 0 for the initial weights; ``what`` is "loss", "gradient" or
    "weights"; ``layer`` is empty for a loss; ``rank`` is a rank of the first run. ``text``
    describes the difference.
    """

    step: int
    what: str
    layer: str
    rank: int
    text: str


@dataclass(frozen=True)
class Comparison:
    """The result of :func:`equal`: true if there is no difference beyond the tolerance.

    ``first`` is the first difference, None if there is none. ``exact`` is true if everything
    compared is bitwise equal; ``largest`` is the largest relative difference within the tolerance;
    ``compared`` is the number of steps and layers, as text.
    """

    first: Difference | None
    exact: bool
    largest: float
    compared: str

    def __bool__(self) -> bool:
        return self.first is None

    def __repr__(self) -> str:
        if self.first is not None:
            return f"Different: {self.first.text}"
        if self.exact:
            return f"Equal to the bit in {self.compared}"
        off = f"the largest difference is {self.largest:.0e} of the largest value"
        return f"Equal in {self.compared}; {off}"


def equal(
    run: HasTrace | EventLog, other: HasTrace | EventLog, *, rtol: float | None = None
) -> Comparison:
    """Compare two trainings step by step: losses, gradients after the all-reduce, and updates.

    Both must have been recorded with :func:`~distkit.watch_gradients`. They may have different
    numbers of ranks: then each rank is compared with rank 0 of the other run, and the loss is the
    mean over all examples. Gradients before the all-reduce are not compared.

    Gradients of more than 64 elements are compared by 64 elements and by their norm. Weights are
    equal if their checksums are; otherwise random projections estimate the difference of the latest
    updates, relative to the longer one. Differences within the rounding of the weights are ignored,
    however small the update is.

    Args:
        run: a run or its trace.
        other: the other run or trace, such as a run of one process.
        rtol: tolerance relative to the largest value compared; by default it allows for a
            different order of summation, by dtype: 1e-4 for float32.

    Returns:
        A comparison that is true if the trainings are equal, and otherwise contains the first step,
        layer and rank that differ.

    Raises:
        ValueError: one of them was not recorded with ``watch_gradients``.

    Source:
        torchtitan, "Converging": comparing the loss curves of a parallel run and a plain one.

    Example:
        >>> dk.equal(cluster.run(train), dk.run_ranks(train, 1))     # doctest: +SKIP
        Equal in all 120 steps and 4 layers; the largest difference is 3e-07 of the largest value
    """
    mine, theirs = (_training(name, it) for name, it in (("first", run), ("second", other)))
    found = _DifferenceFinder(mine, theirs, rtol)
    first = next(chain(found.shapes(), found.differences()), None)
    both = count(len(mine.steps), "step"), count(len(mine.layers), "layer")
    compared = "all " * (len(mine.steps) > 1) + " and ".join(both)
    return Comparison(first, first is None and found.exact, found.largest, compared)


def _training(which: str, given: HasTrace | EventLog) -> Training:
    training = read(given if isinstance(given, EventLog) else given.trace)
    if not training.steps:
        raise ValueError(
            f"the {which} run has no record of a training. Write the loop as `with "
            "dk.watch_gradients(model) as watch:`, and call watch.step(loss=loss) in each step."
        )
    return training


class _DifferenceFinder:
    """Finds the differences of two trainings, in order of computation."""

    def __init__(self, mine: Training, theirs: Training, rtol: float | None) -> None:
        self._first, self._second = mine, theirs
        dtypes = {**mine.dtypes, **theirs.dtypes}
        self._tolerance = {
            layer: TOLERANCES.get(dtype, 0.0) if rtol is None else rtol
            for layer, dtype in dtypes.items()
        }
        self._largest_tolerance = max(self._tolerance.values(), default=rtol or 0.0)
        self._rounding = max((ROUNDING.get(dtype, 0.0) for dtype in dtypes.values()), default=0.0)
        recorded = sorted(mine.weights.keys() & theirs.weights.keys())
        self._since = {later: before for before, later in pairwise(recorded)}
        self.exact, self.largest = True, 0.0

    def shapes(self) -> Iterator[Difference]:
        """Yield layers that exist in only one training, or have different shapes."""
        for layer in {**self._first.layers, **self._second.layers}:
            shapes = [t.layers.get(layer) for t in (self._first, self._second)]
            if shapes[0] != shapes[1]:
                text = " and ".join("missing" if s is None else str(list(s)) for s in shapes)
                yield Difference(0, "weights", layer, 0, f"the shape of {layer}: {text}")

    def differences(self) -> Iterator[Difference]:
        """Yield all differences, step by step."""
        steps = [len(t.steps) for t in (self._first, self._second)]
        yield from self._weights(0)
        for n in range(min(steps)):
            yield from self._loss(n)
            yield from self._gradients(n)
            yield from self._weights(n + 1)
        if steps[0] != steps[1]:
            text = f"the number of steps: {steps[0]} and {steps[1]}, equal as far as both go"
            yield Difference(min(steps) + 1, "loss", "", 0, text)

    # -- results of a step -----------------------------------------------------------------

    def _loss(self, n: int) -> Iterator[Difference]:
        a, b = (t.steps[n] for t in (self._first, self._second))
        mine, theirs = mean_loss(a), mean_loss(b)
        same = mine == theirs or (math.isnan(mine) and math.isnan(theirs))
        if self._exceeds_tolerance(abs(mine - theirs), max(abs(mine), abs(theirs)), same):
            bad = [
                rank
                for rank, report in sorted(a.reports.items())
                if not math.isfinite(report.loss) and report.samples != 0
            ]
            where = f", not finite on rank {bad[0]}" if bad else ""
            text = f"is {mine:.6g} and {theirs:.6g}{where}"
            yield self._difference(n + 1, "loss", "", bad[0] if bad else 0, text)

    def _gradients(self, n: int) -> Iterator[Difference]:
        a, b = (t.steps[n].after for t in (self._first, self._second))
        floor = CANCELLED * _largest(a)
        for layer in reversed(self._first.layers):  # as backward computes them
            for rank, mine in sorted(a.get(layer, {}).items()):
                theirs = _for_rank(rank, b.get(layer, {}))
                if theirs is None:
                    continue
                off, most = _distance(mine, theirs)
                if self._exceeds_tolerance(off, max(most, floor), mine == theirs, layer):
                    text = f"{_far(off)} on rank {rank}, where values reach {most:.2g}"
                    yield self._difference(
                        n + 1, "gradient", layer, rank, text + _factor_hint(mine, theirs)
                    )

    def _weights(self, n: int) -> Iterator[Difference]:
        a, b = (t.weights.get(n, {}) for t in (self._first, self._second))
        which = "initial weights" if n == 0 else "update"
        for rank, (crc, mine) in sorted(a.items()):
            if (found := _for_rank(rank, b)) is None:
                continue
            other_crc, theirs = found
            added = self._update_sketches(n, rank, mine, theirs)
            off, (one, other) = math.dist(*added), (math.hypot(*values) for values in added)
            norm = max(mine.norm, theirs.norm)
            most = norm if off <= self._rounding * norm else max(one, other)
            if self._exceeds_tolerance(off, most, crc == other_crc):
                text = f"{_far(off)} on rank {rank} ({which}); norms: {one:.2g} and {other:.2g}"
                yield self._difference(n, "weights", self._layer(n, rank), rank, text)

    def _update_sketches(self, n: int, rank: int, *now: Summary) -> list[list[float]]:
        """Return the sketches of both updates since the last recorded weights.

        A sketch is linear, so the sketch of an update is the difference of two sketches. The first
        time, the sketches are those of the weights.
        """
        since = self._since.get(n, -1)
        was = [_for_rank(rank, t.weights.get(since, {})) for t in (self._first, self._second)]
        before = [found[1].values for found in was if found]
        if len(before) < 2:
            return [[*summary.values] for summary in now]
        pairs = zip(now, before, strict=True)
        return [[x - y for x, y in zip(s.values, old, strict=True)] for s, old in pairs]

    def _layer(self, n: int, rank: int) -> str:
        """Return the layer whose weights' norms differ most."""
        norms = self._first.norms[n].get(rank, ()), _for_rank(rank, self._second.norms[n]) or ()
        apart = [abs(x - y) / (max(x, y) or 1) for x, y in zip(*norms, strict=False)]
        names = self._first.named
        return names[apart.index(max(apart))] if apart and len(names) == len(apart) else ""

    # -- tolerance ---------------------------------------------------------------------------

    def _exceeds_tolerance(self, off: float, most: float, same: bool, layer: str = "") -> bool:
        """Return whether a difference exceeds the tolerance."""
        tolerance = self._tolerance.get(layer, self._largest_tolerance)
        if same:
            return False
        self.exact = False
        relative = off / most if most else off
        if math.isfinite(relative) and relative <= tolerance:
            self.largest = max(self.largest, relative)
            return False
        return True

    def _difference(self, step: int, what: str, layer: str, rank: int, text: str) -> Difference:
        when = f"in step {step}" if step else "before the first step"
        of = f" of {layer}" if layer else ""
        return Difference(step, what, layer, rank, f"{when} the {what}{of} {text}")


def _for_rank(rank: int, by_rank: Mapping[int, T]) -> T | None:
    """Return the value of this rank in the other run, or else of its first rank."""
    if rank in by_rank or not by_rank:
        return by_rank.get(rank)
    return by_rank[min(by_rank)]


def _distance(a: Summary, b: Summary) -> tuple[float, float]:
    """Return the largest known difference of two tensors, and their largest value."""
    pairs = [*zip(a.values, b.values, strict=False), (a.min, b.min), (a.max, b.max)]
    most = max((abs(v) for pair in pairs for v in pair if math.isfinite(v)), default=0.0)
    norms = abs(a.norm - b.norm) / (max(a.norm, b.norm) or 1)
    apart = [norms * most, *(abs(x - y) for x, y in pairs)]
    return max(d if math.isfinite(d) else math.inf for d in apart), most


def _far(off: float) -> str:
    return f"is {off:.2g} apart" if math.isfinite(off) else "is NaN or infinite in one of the runs"


def _largest(gradients: Mapping[str, ByRank]) -> float:
    """Return the largest value of a step's gradients."""
    ends = (abs(v) for by in gradients.values() for s in by.values() for v in (s.min, s.max))
    return max(filter(math.isfinite, ends), default=0.0)


def _factor_hint(a: Summary, b: Summary) -> str:
    """Return a hint if one norm is a multiple of the other: a sum versus a mean."""
    low, high = sorted((a.norm, b.norm))
    times = round(high / low) if 0 < low <= high < math.inf else 1
    if times < 2 or abs(high / low - times) > 1e-3 * times:
        return ""
    return f"; one is {times} times the other: a sum, where the other is a mean?"
