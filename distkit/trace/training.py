"""Reads the marks of a watched training loop; see :mod:`distkit.recording.gradients`.

No side effects.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from distkit.events import Event, Op, Span, Summary
from distkit.trace.columns import Category
from distkit.trace.log import EventLog, grouped

#: Values of a layer by rank.
ByRank = dict[int, Summary]


def is_training_mark(record: Event | Category) -> bool:
    """Return whether a mark is from ``watch_gradients``; only the gradients view shows it."""
    return "watched" in record.attributes and record.op is Op.MARK


@dataclass(frozen=True)
class StepReport:
    """The values that a rank passed to ``step`` (NaN if missing), and the time of the call [s]."""

    loss: float
    lr: float
    samples: float
    time: float


@dataclass
class Step:
    """The recorded values of one step, on all ranks."""

    before: dict[str, ByRank] = field(default_factory=lambda: defaultdict(dict))
    after: dict[str, ByRank] = field(default_factory=lambda: defaultdict(dict))
    reference: dict[str, ByRank] = field(default_factory=lambda: defaultdict(dict))
    reports: dict[int, StepReport] = field(default_factory=dict)


@dataclass
class Training:
    """A training loop: its steps (from 0), its layers, and the weights after 0, 1, 2 … steps."""

    steps: dict[int, Step] = field(default_factory=lambda: defaultdict(Step))
    layers: dict[str, tuple[int, ...]] = field(default_factory=dict)  # name to shape
    weights: dict[int, dict[int, tuple[str, Summary]]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    dtypes: dict[str, str] = field(default_factory=dict)
    # weight norms of ``normed_layers`` after 0, 1, 2 … steps, by rank
    norms: dict[int, dict[int, tuple[float, ...]]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    normed_layers: tuple[str, ...] = ()

    def feed(self, rank: int, spans: Iterator[Span]) -> None:
        """Process one rank's marks, in order."""
        n = 0
        for s in spans:
            kind, name = s.attributes.get("watched"), str(s.attributes.get("name", ""))
            if kind == "step" and s.after:
                loss, lr, samples = (*s.after.values, *[float("nan")] * 3)[:3]
                self.steps[n].reports[rank] = StepReport(loss, lr, samples, s.end or s.start)
                n += 1
            elif kind == "weights" and s.after:
                self.weights[n][rank] = str(s.attributes.get("checksum", "")), s.after
                self.norms[n][rank] = tuple(s.attributes.get("norms", ()))
                self.normed_layers = self.normed_layers or tuple(s.attributes.get("layers", ()))
            elif kind == "gradient":
                self._gradient(self.steps[n], rank, name, s)
            elif kind == "reference" and s.after:
                self.steps[n].reference[name][rank] = s.after

    def _gradient(self, step: Step, rank: int, name: str, s: Span) -> None:
        self.layers.setdefault(name, s.shape)
        self.dtypes.setdefault(name, s.dtype)
        if s.before:
            step.before[name][rank] = s.before
        if s.after:
            step.after[name][rank] = s.after


def read(trace: EventLog) -> Training:
    """Return the training loop of a trace; it has no steps if none were recorded."""
    marks = (s for s in trace.spans if s.op is Op.MARK and (s.before or s.after))
    lanes = grouped(marks, lambda s: s.rank)
    training = Training()
    for rank in sorted(lanes):
        training.feed(rank, iter(sorted(lanes[rank], key=lambda s: s.seq)))
    training.layers = _in_order(training.layers, lanes)
    return training


def mean_loss(step: Step) -> float:
    """Return the mean loss over the examples of all ranks."""
    shares = shares_of(step)
    return sum(report.loss * shares[r] for r, report in step.reports.items() if shares[r]) / (
        len(shares) or math.nan
    )


def shares_of(step: Step) -> dict[int, float]:
    """Return each rank's number of examples relative to the mean, or 1 if unknown."""
    samples = {r: report.samples for r, report in step.reports.items()}
    mean = sum(samples.values()) / (len(samples) or 1)
    return {r: n / mean if mean > 0 else 1.0 for r, n in samples.items()}


def _in_order(
    layers: dict[str, tuple[int, ...]], lanes: dict[int, list[Span]]
) -> dict[str, tuple[int, ...]]:
    """Sort layers in the model's order, inferred from the completion of the gradients' marks."""
    completions = sorted(
        (s.end, str(s.attributes.get("name", "")))
        for lane in lanes.values()
        for s in lane
        if s.end is not None and s.attributes.get("watched") == "gradient"
    )
    names = dict.fromkeys([*(name for _, name in completions), *reversed(layers)])
    return {name: layers[name] for name in names}
