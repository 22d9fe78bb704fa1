"""Estimates the ideal step of a recorded job without stragglers, and names the slow rank. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from distkit.algorithms.pipeline_schedules import Action
from distkit.trace.trace import Trace
from distkit_simulation.network import Link, Network
from distkit_simulation.simulator import Writer
from distkit_simulation.training import play_pipeline

#: Ratio to the median compute time from which a stage or worker is slow.
SLOW = 1.1
_COMPUTE = {"forward-compute": "F", "backward-compute": "B"}
_MESSAGES = ["forward-send", "forward-recv", "backward-send", "backward-recv"]


@dataclass(frozen=True)
class IdealStep:
    """The result of :func:`ideal_step`: measured and ideal seconds of a step, and the straggler."""

    measured: float
    ideal: float
    slow: str

    def __str__(self) -> str:
        return (
            f"{self.measured:.3f} s a step, {self.ideal:.3f} s without stragglers "
            f"({self.measured / self.ideal:.2f} times as fast): {self.slow or 'no rank is slow'}"
        )


def ideal_step(trace: Trace) -> IdealStep:
    """Replay a step of a recorded pipeline with equal durations, as without stragglers.

    Computations take the mean of their kind over ranks, steps and micro-batches, messages and
    collectives the median.

    Args:
        trace: the trace of a job whose events name their stage, such as ByteDance's.

    Raises:
        ValueError: no event names a stage.

    Source:
        Lin et al., "Understanding stragglers in large model training using what-if analysis", 2025.
    """
    import pandas as pd

    finished = (s for s in trace.spans if "stage" in s.attributes and s.end is not None)
    table = pd.DataFrame(
        {"rank": s.rank, "start": s.start, "end": s.end, "seconds": s.seconds, **s.attributes}
        for s in finished
    )
    if table.empty:
        raise ValueError("no event of this trace names its stage: record a pipeline's steps")
    computed = table[table["label"].isin(_COMPUTE)]
    means = computed.groupby("label")["seconds"].mean()
    medians = table[~table["label"].isin(_COMPUTE)].groupby("label")["seconds"].median()
    first_batch = computed[computed["batch"] == computed["batch"].min()].sort_values("start")
    orders = [
        [
            Action(stage, _COMPUTE[row.label], int(row.microbatch))
            for row in stage_rows[stage_rows["rank"] == stage_rows["rank"].min()].itertuples()
        ]
        for stage, stage_rows in first_batch.groupby("stage")
    ]
    forward, backward = means[[*_COMPUTE]]
    network = Network(Link(medians.get("forward-send", 0.0), 0))
    ends = play_pipeline(Writer(len(orders)), orders, forward, backward, 0, network)
    ideal = max(ends) + medians.drop(_MESSAGES, errors="ignore").sum()
    steps = table.groupby("batch")
    measured = (steps["end"].max() - steps["start"].min()).mean()
    return IdealStep(float(measured), float(ideal), _slow(computed))


def _slow(computed: Any) -> str:
    """Describe the slow stage, or else the slow rank; return "" if there is none."""
    ranks = computed.groupby(["stage", "rank"])["seconds"].mean()
    ranks /= ranks.median()
    fastest = ranks.groupby("stage").min()
    if fastest.max() > SLOW:
        return f"stage {fastest.idxmax()} computes {fastest.max():.2f} times as long as others"
    stage, rank = ranks.idxmax()
    name = f"rank {rank} (stage {stage})"
    return (
        f"{name} computes {ranks.max():.2f} times as long as others" if ranks.max() > SLOW else ""
    )
