"""Estimate of a recorded job's ideal step without stragglers, with the slow rank. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from distkit.algorithms.pipeline_schedules import Action
from distkit.trace.trace import Trace
from distkit_simulation.network import Link, Network
from distkit_simulation.simulator import Writer
from distkit_simulation.training import play_pipeline

#: Ratio to the median compute time above which a stage or worker is slow.
SLOW = 1.1
_COMPUTE = {"forward-compute": "F", "backward-compute": "B"}
_MESSAGES = ["forward-send", "forward-recv", "backward-send", "backward-recv"]


@dataclass(frozen=True)
class IdealStep:
    """Measured and ideal seconds of a step, and the straggler; see :func:`ideal_step`."""

    measured: float
    ideal: float
    slow: str

    def __str__(self) -> str:
        return (
            f"{self.measured:.3f} s per step, {self.ideal:.3f} s without stragglers "
            f"({self.measured / self.ideal:.2f} times as fast): {self.slow or 'no rank is slow'}"
        )


def ideal_step(trace: Trace) -> IdealStep:
    """Replay a step of a recorded pipeline with equal durations, as if no rank were a straggler.

    A computation takes the mean time of its kind over ranks, steps and micro-batches; a message or
    collective takes the median.

    Args:
        trace: the trace of a job whose events have a stage, such as ByteDance's.

    Raises:
        ValueError: no event has a stage.

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
        raise ValueError("no event of this trace has a stage: record the steps of a pipeline")
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
    """Describe the slow stage or, without one, the slow rank; return "" if neither exists."""
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
