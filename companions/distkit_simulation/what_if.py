"""What a recorded job would take without stragglers: the ideal step, and who is slow. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from distkit.algorithms.pipeline_schedules import Action
from distkit.trace.trace import Trace
from distkit_simulation.network import Link, Network
from distkit_simulation.simulator import Writer
from distkit_simulation.training import play_pipeline

#: A stage or a worker is slow if it computes this much longer than the others.
SLOW = 1.1
_COMPUTE = {"forward-compute": "F", "backward-compute": "B"}
_MESSAGES = ["forward-send", "forward-recv", "backward-send", "backward-recv"]


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
    import pandas as pd

    ended = (s for s in trace.spans if "stage" in s.attributes and s.end is not None)
    table = pd.DataFrame(
        {"rank": s.rank, "start": s.start, "end": s.end, "seconds": s.seconds, **s.attributes}
        for s in ended
    )
    if table.empty:
        raise ValueError("no event of this trace names its stage: record a pipeline's steps")
    computed = table[table["label"].isin(_COMPUTE)]
    means = computed.groupby("label")["seconds"].mean()
    usual = table[~table["label"].isin(_COMPUTE)].groupby("label")["seconds"].median()
    one = computed[computed["batch"] == computed["batch"].min()].sort_values("start")
    orders = [
        [
            Action(stage, _COMPUTE[row.label], int(row.microbatch))
            for row in mine[mine["rank"] == mine["rank"].min()].itertuples()
        ]
        for stage, mine in one.groupby("stage")
    ]
    forward, backward = means[[*_COMPUTE]]
    network = Network(Link(usual.get("forward-send", 0.0), 0))
    ends = play_pipeline(Writer(len(orders)), orders, forward, backward, 0, network)
    ideal = max(ends) + usual.drop(_MESSAGES, errors="ignore").sum()
    steps = table.groupby("batch")
    measured = (steps["end"].max() - steps["start"].min()).mean()
    return IdealStep(float(measured), float(ideal), _slow(computed))


def _slow(computed: Any) -> str:
    """The slow stage, or else the slow rank; "" if all are alike."""
    ranks = computed.groupby(["stage", "rank"])["seconds"].mean()
    ranks /= ranks.median()
    least = ranks.groupby("stage").min()
    if least.max() > SLOW:
        return f"stage {least.idxmax()} computes {least.max():.2f} times as long as others"
    stage, rank = ranks.idxmax()
    who = f"rank {rank} (stage {stage})"
    return f"{who} computes {ranks.max():.2f} times as long as others" if ranks.max() > SLOW else ""
