"""What a recorded job would take without stragglers: the ideal step, and who is slow. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median

from distkit.algorithms.pipeline_schedules import Action
from distkit.events import Op, Span
from distkit.trace.trace import Trace
from distkit_simulation.network import Link, Network
from distkit_simulation.simulator import Writer
from distkit_simulation.training import play_pipeline

#: A stage or a worker is slow if it computes this much longer than the others.
SLOW = 1.1
_KINDS = {"forward-compute": "F", "backward-compute": "B"}


@dataclass(frozen=True)
class IdealStep:
    """The result of :func:`ideal_step`: seconds of a step, measured and ideal, and who is slow."""

    measured: float
    ideal: float
    slow: str

    def __str__(self) -> str:
        return (
            f"{self.measured:.3f} s a step, {self.ideal:.3f} s without stragglers "
            f"({self.measured / self.ideal:.2f} times as fast): {self.slow or 'nobody is slow'}"
        )


def ideal_step(trace: Trace) -> IdealStep:
    """Replay a step of a recorded pipeline with equal durations: what would it take?

    Computations take the mean of their kind over ranks, steps and micro-batches, messages and
    collectives the median.

    Args:
        trace: of a job whose events name their stage, such as ByteDance's published ones.

    Raises:
        ValueError: Its events name no stage.

    Source:
        Lin et al., "Understanding stragglers in large model training using what-if analysis", 2025.
    """
    spans = [s for s in trace.spans if "stage" in s.attributes and s.end is not None]
    if not spans:
        raise ValueError("no event of this trace names its stage: record a pipeline's steps")
    steps: dict[int, list[Span]] = defaultdict(list)
    kinds: dict[str, list[float]] = defaultdict(list)
    for s in spans:
        steps[s.attributes["batch"]].append(s)
        kinds[s.label].append(s.seconds or 0.0)
    usual = {k: mean(x) if k in _KINDS else median(x) for k, x in kinds.items()}
    orders = _orders(next(iter(steps.values())))
    message = usual.get("forward-send", 0.0)
    forward, backward = (usual[kind] for kind in _KINDS)
    network = Network(Link(message, 0))
    ends = play_pipeline(Writer(len(orders)), orders, forward, backward, 0, network)
    messages = {s.label for s in spans if s.op in (Op.SEND, Op.RECV)}
    rest = sum(x for kind, x in usual.items() if kind not in messages | {*_KINDS})
    measured = mean(max(s.end or 0.0 for s in x) - min(s.start for s in x) for x in steps.values())
    return IdealStep(measured, max(ends) + rest, _slow(spans))


def _orders(spans: Sequence[Span]) -> list[list[Action]]:
    """What each stage of the first copy computes, in the order of time."""
    found: dict[int, list[Action]] = {}
    first: dict[int, int] = {}
    for s in spans:
        stage = s.attributes["stage"]
        if s.label in _KINDS and s.rank == first.setdefault(stage, s.rank):
            action = Action(stage, _KINDS[s.label], s.attributes["microbatch"])
            found.setdefault(stage, []).append(action)
    return [found[stage] for stage in sorted(found)]


def _slow(spans: Sequence[Span]) -> str:
    """The slow stage, or else the slow rank; "" if all are alike."""
    work: dict[int, list[float]] = defaultdict(list)
    stages = {s.rank: s.attributes["stage"] for s in spans}
    for s in spans:
        if s.label in _KINDS:
            work[s.rank].append(s.seconds or 0.0)
    means = {rank: mean(x) for rank, x in work.items()}
    usual = median(means.values())
    for stage in {*stages.values()}:
        least = min(means[rank] for rank in means if stages[rank] == stage)
        if least > SLOW * usual:
            return f"stage {stage} computes {least / usual:.2f} times as long as others"
    worst = max(means, key=lambda rank: means[rank])
    if means[worst] < SLOW * usual:
        return ""
    who, times = f"rank {worst} (stage {stages[worst]})", means[worst] / usual
    return f"{who} computes {times:.2f} times as long as others"
