"""Comparison of two recorded trainings: the same losses, gradients and weights, or since when not.

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

#: Sums in another order differ by less than this part of the largest value, by dtype.
TOLERANCES = {"float64": 1e-9, "float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}

#: Weights that an optimizer rounds twice, in both trainings, differ by less than this part of them.
ROUNDING = {"float64": 2**-51, "float32": 2**-22, "float16": 2**-9, "bfloat16": 2**-6}

#: A gradient that cancels to nothing, as that of a bias before batch norm, keeps the rounding of
#: what was cancelled: values below this part of the step's largest are measured by that.
CANCELLED = 0.1

T = TypeVar("T")


class HasTrace(Protocol):
    """A run."""

    @property
    def trace(self) -> EventLog:
        """Its events."""


@dataclass(frozen=True)
class Difference:
    """A loss, gradient or weight that differs in two runs.

    ``step`` counts from 1, 0 for the initial weights; ``what`` is "loss", "gradient" or
    "weights"; ``layer`` is empty for a loss; ``rank`` is that of the first run. ``text`` tells
    all of it.
    """

    step: int
    what: str
    layer: str
    rank: int
    text: str


@dataclass(frozen=True)
class Comparison:
    """The result of :func:`equal`: true if nothing differs, within the tolerance.

    ``first`` is the first difference, None if there is none. ``exact`` is true if all that was
    compared is equal to the bit; ``largest`` is the largest relative difference found;
    ``compared`` counts steps and layers.
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
    numbers of ranks: then each rank is compared with rank 0 of the other, and the loss is the mean
    over all examples. What a rank computes before the all-reduce is its own, and not compared.

    A gradient of more than 64 elements is compared by 64 of them and by its norm. Weights are equal
    if their checksums are; else a random projection of the latest update tells how far the two
    updates are apart, as a part of the longer one. What two roundings of the weights explain is no
    difference, however short the update is.

    Args:
        run: a run or its trace.
        other: the other one, such as a run of one process.
        rtol: the largest difference that counts as none, as a part of the largest value compared;
            by default what another order of summation explains, by dtype: 1e-4 for float32.

    Returns:
        Something that is true if they are equal, and otherwise names the first step, layer and rank
        that differ.

    Raises:
        ValueError: one of them was not recorded with ``watch_gradients``.

    Source:
        torchtitan, "Converging": comparing the loss curves of a parallel run and a plain one.

    Example:
        >>> dk.equal(cluster.run(train), dk.run_ranks(train, 1))     # doctest: +SKIP
        Equal in all 120 steps and 4 layers; the largest difference is 3e-07 of the largest value
    """
    mine, theirs = (_training(name, it) for name, it in (("first", run), ("second", other)))
    found = _Finder(mine, theirs, rtol)
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


class _Finder:
    """Finds the differences of two trainings in the order in which a step makes them."""

    def __init__(self, mine: Training, theirs: Training, rtol: float | None) -> None:
        self._mine, self._theirs = mine, theirs
        dtypes = {**mine.dtypes, **theirs.dtypes}
        self._tolerance = {
            layer: TOLERANCES.get(dtype, 0.0) if rtol is None else rtol
            for layer, dtype in dtypes.items()
        }
        self._largest_tolerance = max(self._tolerance.values(), default=rtol or 0.0)
        self._rounding = max((ROUNDING.get(dtype, 0.0) for dtype in dtypes.values()), default=0.0)
        noted = sorted(mine.weights.keys() & theirs.weights.keys())
        self._since = {later: before for before, later in pairwise(noted)}
        self.exact, self.largest = True, 0.0

    def shapes(self) -> Iterator[Difference]:
        """Layers that only one of them has, or of another shape."""
        for layer in {**self._mine.layers, **self._theirs.layers}:
            shapes = [t.layers.get(layer) for t in (self._mine, self._theirs)]
            if shapes[0] != shapes[1]:
                said = " and ".join("missing" if s is None else str(list(s)) for s in shapes)
                yield Difference(0, "weights", layer, 0, f"the shape of {layer}: {said}")

    def differences(self) -> Iterator[Difference]:
        """All of them, step by step."""
        steps = [len(t.steps) for t in (self._mine, self._theirs)]
        yield from self._weights(0)
        for n in range(min(steps)):
            yield from self._loss(n)
            yield from self._gradients(n)
            yield from self._weights(n + 1)
        if steps[0] != steps[1]:
            text = f"the number of steps: {steps[0]} and {steps[1]}, equal as far as both go"
            yield Difference(min(steps) + 1, "loss", "", 0, text)

    # -- what a step makes -----------------------------------------------------------------

    def _loss(self, n: int) -> Iterator[Difference]:
        a, b = (t.steps[n] for t in (self._mine, self._theirs))
        mine, theirs = mean_loss(a), mean_loss(b)
        same = mine == theirs or (math.isnan(mine) and math.isnan(theirs))
        if self._apart(abs(mine - theirs), max(abs(mine), abs(theirs)), same):
            bad = [
                rank
                for rank, told in sorted(a.told.items())
                if not math.isfinite(told.loss) and told.samples != 0
            ]
            where = f", not finite on rank {bad[0]}" if bad else ""
            said = f"is {mine:.6g} and {theirs:.6g}{where}"
            yield self._at(n + 1, "loss", "", bad[0] if bad else 0, said)

    def _gradients(self, n: int) -> Iterator[Difference]:
        a, b = (t.steps[n].after for t in (self._mine, self._theirs))
        floor = CANCELLED * _largest(a)
        for layer in reversed(self._mine.layers):  # as backward computes them
            for rank, mine in sorted(a.get(layer, {}).items()):
                theirs = _of(rank, b.get(layer, {}))
                if theirs is None:
                    continue
                off, most = _distance(mine, theirs)
                if self._apart(off, max(most, floor), mine == theirs, layer):
                    said = f"{_far(off)} on rank {rank}, where values reach {most:.2g}"
                    yield self._at(n + 1, "gradient", layer, rank, said + _factor(mine, theirs))

    def _weights(self, n: int) -> Iterator[Difference]:
        a, b = (t.weights.get(n, {}) for t in (self._mine, self._theirs))
        which = "initial weights" if n == 0 else "update"
        for rank, (crc, mine) in sorted(a.items()):
            if (found := _of(rank, b)) is None:
                continue
            other_crc, theirs = found
            added = self._added(n, rank, mine, theirs)
            off, (one, other) = math.dist(*added), (math.hypot(*values) for values in added)
            norm = max(mine.norm, theirs.norm)
            most = norm if off <= self._rounding * norm else max(one, other)
            if self._apart(off, most, crc == other_crc):
                said = f"{_far(off)} on rank {rank} ({which}); norms: {one:.2g} and {other:.2g}"
                yield self._at(n, "weights", self._layer(n, rank), rank, said)

    def _added(self, n: int, rank: int, *now: Summary) -> list[list[float]]:
        """The sketches of both updates since the weights were noted before; first, of the weights.

        A sketch is linear: that of a difference is the difference of the sketches.
        """
        since = self._since.get(n, -1)
        was = [_of(rank, t.weights.get(since, {})) for t in (self._mine, self._theirs)]
        before = [found[1].values for found in was if found]
        if len(before) < 2:
            return [[*summary.values] for summary in now]
        pairs = zip(now, before, strict=True)
        return [[x - y for x, y in zip(s.values, old, strict=True)] for s, old in pairs]

    def _layer(self, n: int, rank: int) -> str:
        """The layer whose weights' norm differs most."""
        norms = self._mine.norms[n].get(rank, ()), _of(rank, self._theirs.norms[n]) or ()
        apart = [abs(x - y) / (max(x, y) or 1) for x, y in zip(*norms, strict=False)]
        names = self._mine.named
        return names[apart.index(max(apart))] if apart and len(names) == len(apart) else ""

    # -- how far apart -----------------------------------------------------------------------

    def _apart(self, off: float, most: float, same: bool, layer: str = "") -> bool:
        """True for what differs by more than the tolerance."""
        tolerance = self._tolerance.get(layer, self._largest_tolerance)
        if same:
            return False
        self.exact = False
        relative = off / most if most else off
        if math.isfinite(relative) and relative <= tolerance:
            self.largest = max(self.largest, relative)
            return False
        return True

    def _at(self, step: int, what: str, layer: str, rank: int, said: str) -> Difference:
        when = f"in step {step}" if step else "before the first step"
        of = f" of {layer}" if layer else ""
        return Difference(step, what, layer, rank, f"{when} the {what}{of} {said}")


def _of(rank: int, by_rank: Mapping[int, T]) -> T | None:
    """What this rank of the other run has, or else its first rank."""
    if rank in by_rank or not by_rank:
        return by_rank.get(rank)
    return by_rank[min(by_rank)]


def _distance(a: Summary, b: Summary) -> tuple[float, float]:
    """The largest difference of two tensors, as far as it is known, and their largest value."""
    pairs = [*zip(a.values, b.values, strict=False), (a.min, b.min), (a.max, b.max)]
    most = max((abs(v) for pair in pairs for v in pair if math.isfinite(v)), default=0.0)
    norms = abs(a.norm - b.norm) / (max(a.norm, b.norm) or 1)
    apart = [norms * most, *(abs(x - y) for x, y in pairs)]
    return max(d if math.isfinite(d) else math.inf for d in apart), most


def _far(off: float) -> str:
    return f"is {off:.2g} apart" if math.isfinite(off) else "is NaN or infinite in one of the runs"


def _largest(gradients: Mapping[str, ByRank]) -> float:
    """The largest value of a step's gradients."""
    ends = (abs(v) for by in gradients.values() for s in by.values() for v in (s.min, s.max))
    return max(filter(math.isfinite, ends), default=0.0)


def _factor(a: Summary, b: Summary) -> str:
    """A hint, if one is a multiple of the other: somebody summed, and somebody averaged."""
    low, high = sorted((a.norm, b.norm))
    times = round(high / low) if 0 < low <= high < math.inf else 1
    if times < 2 or abs(high / low - times) > 1e-3 * times:
        return ""
    return f"; one is {times} times the other: a sum, where the other is a mean?"
