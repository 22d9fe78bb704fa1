"""Compares two recorded training runs and finds the first loss, gradient or weight that differs.

No side effects. The values are those that :func:`distkit.watch_gradients` has recorded.
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
from distkit.trace.training import Training, mean_loss, read

#: Relative tolerance for a different order of summation, by dtype.
TOLERANCES = {"float64": 1e-9, "float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}

#: Relative tolerance for weights, by dtype. The optimizer of each run rounds the weights twice.
ROUNDING = {"float64": 2**-51, "float32": 2**-22, "float16": 2**-9, "bfloat16": 2**-6}

#: A gradient that cancels to zero, such as the gradient of a bias before batch norm, consists of
#: rounding errors. Gradients below this fraction of the step's largest value are compared relative
#: to that fraction.
CANCELED = 0.1

T = TypeVar("T")


class HasTrace(Protocol):
    """An object with a trace, such as a run."""

    @property
    def trace(self) -> EventLog:
        """The events."""


@dataclass(frozen=True)
class Difference:
    """A loss, gradient or weight that differs between two runs.

    ``step`` counts from 1, and is 0 for shapes and initial weights. ``what`` is "loss", "gradient"
    or "weights". ``layer`` is empty for a loss, or if it is unknown. ``rank`` is a rank of the
    first run. ``text`` describes the difference.
    """

    step: int
    what: str
    layer: str
    rank: int
    text: str


@dataclass(frozen=True)
class Comparison:
    """The result of :func:`equal`, true if no difference exceeds the tolerance.

    ``first`` is the first difference, or None. ``exact`` is true if all compared values are
    bitwise equal. ``largest`` is the largest relative difference within the tolerance.
    ``compared`` states the numbers of steps and parameters as text.
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
            return f"Bitwise equal in {self.compared}"
        note = f"the largest difference is {self.largest:.0e} of the largest value"
        return f"Equal in {self.compared}; {note}"


def equal(
    run: HasTrace | EventLog, other: HasTrace | EventLog, *, rtol: float | None = None
) -> Comparison:
    """Compare two training runs step by step: losses, gradients after the all-reduce, and updates.

    Both must have been recorded with :func:`~distkit.watch_gradients`. Each rank of the first run
    is compared with the same rank of the other run or, if there is none, with its first rank. A
    loss is the mean over the examples of all ranks. Gradients before the all-reduce are not
    compared.

    If a gradient has more than 64 elements, only 64 of them, the extremes and the norm are
    compared.
    Weights with the same checksum are considered identical; otherwise random projections estimate
    the difference between the latest updates, relative to the larger one. Differences within the
    rounding error of the weights are ignored, even for small updates.

    Args:
        run: a run or its trace.
        other: the other run or trace, such as a single-process run.
        rtol: tolerance relative to the largest value compared. The default allows for a different
            order of summation and depends on the dtype: 1e-4 for float32.

    Returns:
        A comparison, which is true if the runs agree and otherwise contains the first step,
        layer and rank that differ.

    Raises:
        ValueError: a run was not recorded with ``watch_gradients``.

    Source:
        torchtitan, "Converging", which compares the loss curves of parallel and single-device runs.

    Example:
        >>> dk.equal(cluster.run(train), dk.run_ranks(train, 1))     # doctest: +SKIP
        Equal in all 20 steps and 4 parameters; the largest difference is 3e-7 of the largest value
    """
    first_training, second_training = (
        _training(name, run_or_trace) for name, run_or_trace in (("first", run), ("second", other))
    )
    finder = _DifferenceFinder(first_training, second_training, rtol)
    difference = next(chain(finder.shapes(), finder.differences()), None)
    steps, parameters = len(first_training.steps), len(first_training.layers)
    compared = f"{'all ' * (steps > 1)}{count(steps, 'step')} and {count(parameters, 'parameter')}"
    return Comparison(difference, difference is None and finder.exact, finder.largest, compared)


def _training(position: str, run: HasTrace | EventLog) -> Training:
    training = read(run if isinstance(run, EventLog) else run.trace)
    if not training.steps:
        raise ValueError(
            f"the {position} run has not recorded any training. Write the loop inside `with "
            "dk.watch_gradients(model) as watch:`, and call watch.step(loss=loss) in each step."
        )
    return training


class _DifferenceFinder:
    """Finds the differences between two training runs, in order of computation."""

    def __init__(self, first: Training, second: Training, rtol: float | None) -> None:
        self._first, self._second = first, second
        dtypes = {**first.dtypes, **second.dtypes}
        self._tolerance = {
            layer: TOLERANCES.get(dtype, 0.0) if rtol is None else rtol
            for layer, dtype in dtypes.items()
        }
        self._largest_tolerance = max(self._tolerance.values(), default=rtol or 0.0)
        self._rounding = max((ROUNDING.get(dtype, 0.0) for dtype in dtypes.values()), default=0.0)
        recorded = sorted(first.weights.keys() & second.weights.keys())
        self._previous_steps = {later: earlier for earlier, later in pairwise(recorded)}
        self.exact, self.largest = True, 0.0

    def shapes(self) -> Iterator[Difference]:
        """Yield a difference for each layer that only one run has, or that differs in shape."""
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
            text = f"the number of steps: {steps[0]} and {steps[1]}; the common steps are equal"
            yield Difference(min(steps) + 1, "loss", "", 0, text)

    # -- results of a step -----------------------------------------------------------------

    def _loss(self, n: int) -> Iterator[Difference]:
        a, b = (t.steps[n] for t in (self._first, self._second))
        loss, other_loss = mean_loss(a), mean_loss(b)
        same = loss == other_loss or (math.isnan(loss) and math.isnan(other_loss))
        if self._exceeds_tolerance(abs(loss - other_loss), max(abs(loss), abs(other_loss)), same):
            yield self._difference(n + 1, "loss", "", 0, f"is {loss:.6g} and {other_loss:.6g}")

    def _gradients(self, n: int) -> Iterator[Difference]:
        a, b = (t.steps[n].after for t in (self._first, self._second))
        values = (abs(v) for g in a.values() for s in g.values() for v in (s.min, s.max))
        floor = CANCELED * max(filter(math.isfinite, values), default=0.0)
        for layer in reversed(self._first.layers):  # in the order of the backward pass
            for rank, gradient in sorted(a.get(layer, {}).items()):
                other = _for_rank(rank, b.get(layer, {}))
                if other is None:
                    continue
                distance, largest = _distance(gradient, other)
                if self._exceeds_tolerance(distance, max(largest, floor), gradient == other, layer):
                    text = (
                        f"{_distance_text(distance)} on rank {rank}, "
                        f"where values reach {largest:.2g}"
                    )
                    yield self._difference(
                        n + 1, "gradient", layer, rank, text + _factor_hint(gradient, other)
                    )

    def _weights(self, n: int) -> Iterator[Difference]:
        a, b = (t.weights.get(n, {}) for t in (self._first, self._second))
        kind = "initial weights" if n == 0 else "update"
        for rank, (crc, weights) in sorted(a.items()):
            if (other_entry := _for_rank(rank, b)) is None:
                continue
            other_crc, other_weights = other_entry
            sketches = self._update_sketches(n, rank, weights, other_weights)
            distance, (one, other) = (
                math.dist(*sketches),
                (math.hypot(*values) for values in sketches),
            )
            norm = max(weights.norm, other_weights.norm)
            scale = norm if distance <= self._rounding * norm else max(one, other)
            if self._exceeds_tolerance(distance, scale, crc == other_crc):
                text = (
                    f"{_distance_text(distance, plural=True)} on rank {rank} ({kind}); "
                    f"norms: {one:.2g} and {other:.2g}"
                )
                yield self._difference(n, "weights", self._layer(n, rank), rank, text)

    def _update_sketches(self, n: int, rank: int, *current: Summary) -> list[list[float]]:
        """Return the sketches of both updates since the last recorded weights.

        A sketch is linear, so the sketch of an update is the difference of two sketches. For the
        first recorded weights, return the sketches of the weights.
        """
        step = self._previous_steps.get(n, -1)
        entries = [_for_rank(rank, t.weights.get(step, {})) for t in (self._first, self._second)]
        previous = [entry[1].values for entry in entries if entry]
        if len(previous) < 2:
            return [[*summary.values] for summary in current]
        pairs = zip(current, previous, strict=True)
        return [[x - y for x, y in zip(s.values, old, strict=True)] for s, old in pairs]

    def _layer(self, n: int, rank: int) -> str:
        """Return the layer whose weight norms differ most."""
        norms = self._first.norms[n].get(rank, ()), _for_rank(rank, self._second.norms[n]) or ()
        differences = [abs(x - y) / (max(x, y) or 1) for x, y in zip(*norms, strict=False)]
        names = self._first.normed_layers
        return (
            names[differences.index(max(differences))]
            if differences and len(names) == len(differences)
            else ""
        )

    # -- tolerance ---------------------------------------------------------------------------

    def _exceeds_tolerance(
        self, distance: float, scale: float, same: bool, layer: str = ""
    ) -> bool:
        """Return whether a difference exceeds the tolerance."""
        tolerance = self._tolerance.get(layer, self._largest_tolerance)
        if same:
            return False
        self.exact = False
        relative = distance / scale if scale else distance
        if math.isfinite(relative) and relative <= tolerance:
            self.largest = max(self.largest, relative)
            return False
        return True

    def _difference(self, step: int, what: str, layer: str, rank: int, text: str) -> Difference:
        when = f"in step {step}" if step else "before the first step"
        owner = f" of {layer}" if layer else ""
        return Difference(step, what, layer, rank, f"{when} the {what}{owner} {text}")


def _for_rank(rank: int, by_rank: Mapping[int, T]) -> T | None:
    """Return the other run's value for this rank or, if there is none, for its first rank."""
    if rank in by_rank or not by_rank:
        return by_rank.get(rank)
    return by_rank[min(by_rank)]


def _distance(a: Summary, b: Summary) -> tuple[float, float]:
    """Return the largest known difference between two tensors, and their largest magnitude."""
    pairs = [*zip(a.values, b.values, strict=False), (a.min, b.min), (a.max, b.max)]
    largest = max((abs(v) for pair in pairs for v in pair if math.isfinite(v)), default=0.0)
    norms = abs(a.norm - b.norm) / (max(a.norm, b.norm) or 1)
    distances = [norms * largest, *(abs(x - y) for x, y in pairs)]
    return max(d if math.isfinite(d) else math.inf for d in distances), largest


def _distance_text(distance: float, *, plural: bool = False) -> str:
    return (
        f"differ{'s' * (not plural)} by {distance:.2g}"
        if math.isfinite(distance)
        else f"{'are' if plural else 'is'} NaN or infinite in one of the runs"
    )


def _factor_hint(a: Summary, b: Summary) -> str:
    """Return a hint about sum versus mean if one norm is a multiple of the other."""
    low, high = sorted((a.norm, b.norm))
    factor = round(high / low) if 0 < low <= high < math.inf else 1
    if factor < 2 or abs(high / low - factor) > 1e-3 * factor:
        return ""
    return f"; one is {factor} times the other, as for a sum versus a mean"
