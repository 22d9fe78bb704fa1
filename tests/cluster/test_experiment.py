"""Experiments on real ranks: run, report progress, stop, fail and clean up."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pandas as pd
import pytest
import torch
import torch.distributed as dist

import distkit as dk
from distkit.events import Op, State
from distkit_experiments.panel import message


@pytest.fixture(scope="module")
def cluster() -> Iterator[dk.Cluster]:
    with dk.Cluster(2) as cluster:
        yield cluster


@pytest.fixture
def usable(cluster: dk.Cluster) -> Iterator[dk.Cluster]:
    """A cluster that must still work after the test."""
    yield cluster
    assert cluster.run(dist.get_rank).results == [0, 1]


def count_up(steps: int = 5, size: int = 64, algorithm: str = "ring") -> dict[str, float]:
    x = torch.ones(size // 4)
    for _ in range(steps):
        with dk.mark("step"):
            (dk.algorithms.ring_all_reduce if algorithm == "ring" else dist.all_reduce)(x)
    return {"first": x[0].item(), "ranks": dist.get_world_size()}


def endless() -> None:
    while True:
        with dk.mark("step"):
            dist.all_reduce(torch.ones(1))


def wait_for(experiment: dk.Experiment, condition: Callable[[dk.Experiment], Any]) -> None:
    """Wait for a condition, which is checked whenever the experiment changes."""
    met = threading.Event()

    def check(e: dk.Experiment) -> None:
        if condition(e):
            met.set()

    experiment._watchers.append(check)
    check(experiment)
    try:
        assert met.wait(60)
    finally:
        experiment._watchers.remove(check)


def idle(experiment: dk.Experiment) -> bool:
    return experiment.activity is None and not experiment._run_lock.locked()


def test_experiment_runs_and_sweeps(usable: dk.Cluster) -> None:
    experiment = dk.Experiment(count_up, usable, size=(64, 4096), algorithm=["ring", "gloo"])
    run = experiment.run(size=128)
    assert run.results == [{"first": 32.0, "ranks": 2}] * 2
    runs = experiment.sweep(size=[64, 256], algorithm=["ring", "gloo"])
    assert [run, *runs] == [run for _, run in experiment.runs]
    assert experiment.runs[0][0] == {"ranks": 2, "size": 128, "algorithm": "ring"}
    table = experiment.to_dataframe()
    assert table["size"].tolist() == [128, 64, 64, 256, 256]
    assert table["messages"].tolist() == [20, 20, 0, 20, 0]  # 5 × 2 ranks × 2 rounds
    assert table["collectives"].tolist() == [0, 0, 5, 0, 5]
    assert table["bytes"].tolist() == [1280, 640, 320, 2560, 1280]
    assert table["first"].tolist() == [32.0] * 5
    assert (table["seconds"] > 0).all() and (table["outcome"] == "ok").all()
    assert "ranks returned" in table  # a result with the name of a parameter
    experiment.close()


def test_experiment_starts_and_stops_clusters_for_other_numbers_of_ranks(
    usable: dk.Cluster, leftovers: Callable[[], list[str]]
) -> None:
    with dk.Experiment(dist.get_rank, usable, ranks=(1, 3)) as experiment:
        assert experiment.run().results == [0, 1]
        assert experiment.run(ranks=3).results == [0, 1, 2]
        assert experiment.run(ranks=1).results == [0]
    assert not leftovers()


def test_latency_and_bandwidth_are_controls_unless_they_are_parameters(
    usable: dk.Cluster,
) -> None:
    experiment = dk.Experiment(count_up, usable, latency=(1e-4, 0.05), bandwidth=(1e3, 1e9))
    assert {"latency", "bandwidth"} <= {*experiment.settings.controls}
    slow = experiment.run(latency=0.03, bandwidth=1e9, steps=2, algorithm="gloo", size=64)
    assert slow.seconds >= 2 * 0.03
    assert experiment.to_dataframe()["latency"].tolist() == [0.03]
    experiment.close()

    def with_latency(latency: float = 1.0) -> float:
        return latency

    with dk.Experiment(with_latency, usable, latency=(0.5, 2.0)) as experiment:
        assert experiment.run(latency=1.5).results == [1.5, 1.5]


def test_experiment_starts_its_own_cluster(leftovers: Callable[[], list[str]]) -> None:
    with dk.Experiment(dist.get_world_size, ranks=[2, 3]) as experiment:
        assert [r.results for r in experiment.sweep(ranks=[2, 3])] == [[2, 2], [3, 3, 3]]
        assert experiment.to_dataframe()["result"].tolist() == [2, 3]
    assert not leftovers()


def test_straggler_delays_the_last_rank(usable: dk.Cluster) -> None:
    experiment = dk.Experiment(count_up, usable, straggler=(0, 0.5))
    with dk.inject_faults(latency=0.001):  # added to the faults already injected
        run = experiment.run(straggler=0.05, steps=3, algorithm="gloo")
    assert run.seconds >= 3 * 0.05
    scheduled = {e.seq: e.time for e in run.trace.by_rank[1] if e.state is State.SCHEDULED}
    delays = [
        e.time - scheduled[e.seq]
        for e in run.trace.by_rank[1]
        if e.state is State.STARTED and e.op is Op.ALL_REDUCE
    ]
    assert len(delays) == 3 and min(delays) >= 0.05
    experiment.close()


def test_panel_runs_reports_progress_and_stops(usable: dk.Cluster) -> None:
    experiment = dk.Experiment(endless, usable)
    panel = experiment.panel
    seen = []
    panel._run.click()
    wait_for(experiment, lambda e: seen.append(panel._bar.status.value) or "step" in seen[-1])
    assert panel._run.disabled
    with pytest.raises(dk.errors.ClusterError, match="the experiment is running endless"):
        experiment.run()
    other = dk.Experiment(count_up, usable)
    with pytest.raises(dk.errors.ClusterError, match="the cluster is busy with endless"):
        other.run()
    other.panel._run.click()
    wait_for(other, lambda e: e.error is not None and idle(e))
    assert "the cluster is busy with endless" in other.panel._message.value
    panel._bar.stop.click()
    wait_for(experiment, idle)
    assert experiment.records[-1].outcome == "stopped"
    assert "endless was stopped on all ranks" in panel._message.value
    assert panel._bar.stop.disabled and not panel._run.disabled
    for each in (experiment, other):
        each.close()


def fail(on_rank_1: bool = True) -> None:
    if on_rank_1 and dist.get_rank() == 1:
        raise ValueError("1 < 2")
    dist.barrier()


def test_error_is_raised_and_displayed(usable: dk.Cluster) -> None:
    output = "rank 1 raised ValueError: 1 &lt; 2"
    experiment = dk.Experiment(fail, usable)
    with pytest.raises(dk.errors.RankError):
        experiment.run()
    assert output in message(experiment)
    experiment.panel._run.click()
    wait_for(experiment, lambda e: len(e.records) == 2 and idle(e))
    assert output in experiment.panel._message.value
    assert [r.outcome for r in experiment.records] == ["RankError"] * 2
    experiment.run(on_rank_1=False)
    assert message(experiment) == ""
    experiment.close()


def test_run_raises_on_a_stopped_cluster_and_with_too_many_ranks() -> None:
    with dk.Cluster(1) as stopped:
        experiment = dk.Experiment(count_up, stopped, ranks=(1, 100_000))
    with pytest.raises(dk.errors.StoppedError, match="the cluster was stopped"):
        experiment.run()
    with pytest.raises(dk.errors.StartError, match="enough for"):
        experiment.run(ranks=100_000)
    assert "StartError" in message(experiment)
    experiment.close()


# -- dk.sweep --------------------------------------------------------------------------


def test_sweep_returns_a_data_frame_of_results_and_traces(
    leftovers: Callable[[], list[str]],
) -> None:
    def train(batch: int, factor: float = 1.0) -> dict[str, float]:
        x = torch.ones(batch) * factor
        dist.all_reduce(x)
        return {"sum": x.sum().item()}

    found = dk.sweep(train, ranks=[2, 1], batch=[8, 16], factor=2.0)
    assert type(found) is pd.DataFrame
    assert found[["ranks", "batch", "factor", "sum"]].values.tolist() == [
        [2, 8, 2.0, 32.0],
        [2, 16, 2.0, 64.0],
        [1, 8, 2.0, 16.0],
        [1, 16, 2.0, 32.0],
    ]
    assert [t.ranks for t in found.trace] == [[0, 1], [0, 1], [0], [0]]
    assert (found.seconds > 0).all() and (found.outcome == "ok").all()
    assert not leftovers()


def test_interrupted_sweep_leaves_no_process(leftovers: Callable[[], list[str]]) -> None:
    kernel = os.getpid()

    def interrupted(batch: int) -> None:
        dist.barrier()
        if dist.get_rank() == 0:
            os.kill(kernel, signal.SIGINT)
        dist.recv(torch.ones(batch), src=1 - dist.get_rank())

    with pytest.raises(dk.errors.RunStopped):
        dk.sweep(interrupted, ranks=2, batch=[8, 16])
    assert not leftovers()


def test_failed_run_is_a_row_of_the_sweep(usable: dk.Cluster) -> None:
    def fail_if_even(batch: int) -> float:
        if batch % 2 == 0:
            raise ValueError(f"batch {batch}")
        return batch / 2

    with pytest.warns(UserWarning, match=r"1 of 2 runs failed.* ranks=2, batch=8: .*batch 8"):
        found = dk.sweep(fail_if_even, usable, batch=[7, 8])
    assert found.outcome.tolist() == ["ok", "RankError"]
    assert found.result.tolist()[0] == 3.5
    with pytest.raises(dk.errors.RankError, match="batch 8"):
        dk.sweep(fail_if_even, usable, batch=[8, 16])
