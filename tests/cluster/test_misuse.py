"""Harm that a function does to its rank is reported rightly, and the next run is as before.

A sample, one of each way to harm; ``make stress`` has them all. The process ends, or is
interrupted; an error while the other rank is deep in C, dies of the release, or waits itself;
exceptions and results that run code when they are shown or unpickled; and what outlives a run:
signals, timers, descriptors, folders, torch's settings and modes, builtins, modules, children.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
import torch.distributed as dist
from waiting import until

import distkit as dk
from tests.stress.misuse.catalogue import ALL
from tests.stress.misuse.trial import Trial

SAMPLE = [
    "exits",
    "terminates_itself",
    "interrupts_itself",
    "raises_while_another_is_in_a_regular_expression",
    "raises_and_another_dies_on_release",
    "raises_and_then_waits",
    "raises_error_whose_str_exits",
    "returns_value_that_raises_when_unpickled",
    "replaces_signal_handlers",
    "leaves_a_timer",
    "closes_all_descriptors_and_returns",
    "removes_its_working_directory",
    "changes_torch",
    "leaves_torch_in_a_mode",
    "replaces_builtins",
    "removes_all_modules",
    "forks_a_child_that_returns",
    "loads_data_with_workers",
]


@pytest.fixture(scope="module")
def trial() -> Iterator[Trial]:
    trial = Trial()
    yield trial
    trial.close()


@pytest.mark.parametrize("name", SAMPLE)
def test_misuse_is_reported_and_harms_no_later_run(trial: Trial, name: str) -> None:
    assert trial.faults(ALL[name]) == []


def test_a_cell_keeps_what_it_set_and_not_what_it_broke(trial: Trial) -> None:
    cluster: dk.Cluster = trial.cluster
    cluster.execute("import signal; torch.set_default_dtype(torch.float64)")
    cluster.execute("signal.signal(signal.SIGTERM, signal.SIG_IGN); dist.all_reduce = None")
    kept = cluster.execute(
        "str(torch.ones(1).dtype), int(signal.getsignal(signal.SIGTERM)), callable(dist.all_reduce)"
    ).results
    assert kept == [("torch.float64", 0, True)] * 2
    cluster.restart()


def stop() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.barrier()


@pytest.mark.parametrize("end", ["interrupt", "continue", "restart"])
def test_a_stopped_rank_is_said_to_be_stopped(
    trial: Trial, end: str, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster: dk.Cluster = trial.cluster
    run = cluster.submit(stop)
    until(lambda: [f.kind for f in cluster.diagnose()][:1] == ["stopped"])
    pid = cluster.status().rows[1][2]
    assert cluster.status().rows[1][4] == "stopped"
    assert f"kill -CONT {pid}" in str(cluster.diagnose()[0])
    if end == "continue":
        os.kill(pid, signal.SIGCONT)
        assert run.wait(10).results == [None, None]
    else:
        (cluster.interrupt if end == "interrupt" else cluster.restart)()
        with pytest.raises(dk.errors.RunInterrupted, match=r"Rank 1 was stopped \(SIGSTOP\)"):
            run.wait(10)
    assert cluster.run(dist.get_rank).results == [0, 1]
    assert (
        "rank 1 is stopped (SIGSTOP), and ranks that wait for it stay blocked. "
        f"`kill -CONT {pid}` continues it" in capsys.readouterr().err
    )
