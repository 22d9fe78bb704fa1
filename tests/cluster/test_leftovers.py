"""Shadowing files, daemons, killed fork servers and deleted folders."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from pathlib import Path

import ipyparallel  # noqa: F401  # imported before the files are written, as in a kernel
import psutil
import pytest
import torch
import torch.distributed as dist
from waiting import wait_until

import distkit as dk
from distkit.cluster.processes import fork_client


def fork_server(fork: fork_client.ForkClient) -> psutil.Process:
    subreaper = psutil.Process(fork.process.pid)
    wait_until(subreaper.children)
    return subreaper.children()[0]


def test_process_forked_during_stop_ends(fresh: fork_client.ForkClient) -> None:
    """The kernel may not yet know the pid of a requested process when it stops the cluster."""
    folder = fresh.make_folder(1)
    role = "distkit.cluster.processes.roles:controller"
    process = fresh.start_fork(role, folder=folder, log="late.log", period=200, misses=10)
    process.wait_for_start()
    process.on_message(lambda message: None)
    fresh.remove(folder)
    assert process.wait(10)
    process.channel.shutdown()
    wait_until(lambda: not Path(folder).exists())


def sum_of_ones() -> float:
    x = torch.ones(1)
    dist.all_reduce(x)
    return x.item()


SHADOWED_MODULES = [
    "random",
    "queue",
    "json",
    "pickle",
    "socket",
    "typing_extensions",
    "numpy",
    "torch",
    "ipyparallel",
    "zmq",
    "psutil",
    "distkit",
    "tempfile",
    "optree",
    "pandas",
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory, on all import paths, with files named like modules."""
    for name in SHADOWED_MODULES:
        (tmp_path / f"{name}.py").write_text(f"raise RuntimeError('{name}.py was imported')")
    (tmp_path / "mine.py").write_text("value = 7")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("HOME", "/proc/nothing")  # not writable
    monkeypatch.delenv("IPYTHONDIR", raising=False)
    return tmp_path


def test_user_files_do_not_shadow_modules(folder: Path, fresh: fork_client.ForkClient) -> None:
    def program() -> float:
        import mine

        return float(sum_of_ones() + mine.value)

    with dk.Cluster(2) as cluster:
        assert cluster.run(program).results == [9.0, 9.0]
    assert dk.run_ranks(program, 2).results == [9.0, 9.0]


def start_processes() -> list[int]:
    """Start a child, one in a new session, one with an empty environment, and a daemon."""
    sleep = ["sleep", "1000"]
    started = [
        subprocess.Popen(sleep),
        subprocess.Popen(sleep, start_new_session=True),
        subprocess.Popen(sleep, start_new_session=True, env={}),
    ]
    output = subprocess.run(
        ["sh", "-c", "setsid sleep 1000 >/dev/null & echo $!"],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return [p.pid for p in started] + [int(output.stdout)]


def have_ended(pids: list[list[int]]) -> bool:
    return not any(psutil.pid_exists(pid) for rank_pids in pids for pid in rank_pids)


def test_processes_started_by_a_rank_end_with_its_run_or_its_death(tmp_path: Path) -> None:
    def program() -> None:
        Path(tmp_path, f"{dist.get_rank()}").write_text(json.dumps(start_processes()))
        Path(tmp_path, f"{dist.get_rank()}").rename(tmp_path / f"started-{dist.get_rank()}")
        time.sleep(1000)

    with dk.Cluster(2) as cluster:
        pids = cluster.run(start_processes).results
        wait_until(lambda: have_ended(pids))
        run = cluster.submit(program)
        wait_until(lambda: len(list(tmp_path.glob("started-*"))) == 2)
        pids = [json.loads((tmp_path / f"started-{rank}").read_text()) for rank in range(2)]
        assert not have_ended(pids[:1])
        cluster.kill("rank 0")
        with pytest.raises(dk.errors.RankDied):
            run.wait()
    wait_until(lambda: have_ended(pids))


def test_killed_fork_server_is_reported(fresh: fork_client.ForkClient) -> None:
    cluster = dk.Cluster(workers=2, servers=1)
    folder = cluster._supervisor.folder
    pids = cluster.run(start_processes).results
    run = cluster.submit(time.sleep, 100)
    fork_server(fresh).kill()
    with pytest.raises(dk.errors.RunError, match=r"forked from exited \(signal SIGKILL\)"):
        run.wait(10)
    wait_until(lambda: cluster._supervisor.stage == "failed")
    with pytest.raises(dk.errors.StartError, match=r"forked from exited(?s:.*)signal SIGKILL"):
        cluster.run(sum_of_ones)
    wait_until(lambda: have_ended(pids))
    assert dk.run_ranks(sum_of_ones, 2).results == [2.0, 2.0]
    cluster.stop()
    wait_until(lambda: not Path(folder).exists())


def test_deleted_folder_is_reported() -> None:
    with dk.Cluster(2).wait() as cluster:
        shutil.rmtree(cluster._supervisor.folder)
        with pytest.raises(dk.errors.StartError, match=r"no longer exists(?s:.*)Create the cl"):
            cluster.run(sum_of_ones)
