"""Functions that harm their rank are reported correctly, and the next run works.

This sample has a misuse of each kind; ``make stress`` runs all. The kinds are process exits,
interrupts, errors while the other rank is in C code, exceptions and results that run code when
displayed or unpickled, closed descriptors, deleted folders, changed settings, and child processes.
"""

from __future__ import annotations

import os
import signal
from concurrent import futures
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from waiting import wait_until

import distkit as dk
from tests.stress.misuse.catalog import ALL
from tests.stress.misuse.test_misuse import trial as trial
from tests.stress.misuse.trial import Trial

SAMPLE = [
    "exits",
    "terminates_itself",
    "interrupts_itself",
    "raises_while_other_rank_is_in_a_regular_expression",
    "raises_error_whose_str_exits",
    "returns_value_that_raises_when_unpickled",
    "closes_all_descriptors_and_returns",
    "removes_its_working_directory",
    "changes_torch",
    "forks_a_child_that_returns",
    "loads_data_with_workers",
]


@pytest.mark.parametrize("name", SAMPLE)
def test_misuse_is_reported_and_next_run_works(trial: Trial, name: str) -> None:
    assert trial.faults(ALL[name]) == []


def test_settings_of_a_cell_apply_to_later_cells_only(trial: Trial) -> None:
    cluster: dk.Cluster = trial.cluster
    cluster.execute("torch.set_default_dtype(torch.float64)")
    assert cluster.execute("str(torch.ones(1).dtype)").results == ["torch.float64"] * 2
    assert cluster.run(lambda: str(torch.ones(1).dtype)).results == ["torch.float32"] * 2
    cluster.restart()
    assert cluster.execute("str(torch.ones(1).dtype)").results == ["torch.float32"] * 2
    cluster.restart()


WAITING_CELL = """import time; open(f"{folder}/{{rank}}", "w")
time.sleep(60) if rank else dist.barrier()
"""


def test_cell_in_a_collective_reports_its_line_after_a_failed_cell(
    trial: Trial, tmp_path: Path
) -> None:
    cluster: dk.Cluster = trial.cluster
    with pytest.raises(dk.errors.RankError, match="ZeroDivisionError"):
        cluster.execute("1 / 0")
    with futures.ThreadPoolExecutor() as pool:
        cell = pool.submit(cluster.execute, WAITING_CELL.format(folder=tmp_path), file="cell.py")
        wait_until(lambda: len([*tmp_path.iterdir()]) == 2)
        cluster.interrupt()
        with (
            pytest.warns(
                dk.errors.CommunicationWarning, match="variables of %%ranks cells are lost"
            ),
            pytest.raises(dk.errors.RunInterrupted, match=r"Ranks 0 and 1 were at cell\.py:2"),
        ):
            cell.result(10)


def stop_rank_1() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.barrier()


@pytest.mark.parametrize("ending", ["interrupt", "continue"])
def test_run_with_a_stopped_rank_ends(trial: Trial, ending: str) -> None:
    cluster: dk.Cluster = trial.cluster
    run = cluster.submit(stop_rank_1)
    process = psutil.Process(cluster.status().rows[1][2])
    wait_until(lambda: process.status() == psutil.STATUS_STOPPED)
    if ending == "continue":
        process.resume()
        assert run.wait(10).results == [None, None]
    else:
        cluster.interrupt()
        with pytest.raises(dk.errors.RunInterrupted, match="stop_rank_1 was stopped"):
            run.wait(10)
    assert cluster.run(dist.get_rank).results == [0, 1]
