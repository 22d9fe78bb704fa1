"""A cluster starts, runs, fails, recovers and leaves no process behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from training import sum_over_ranks
from waiting import wait_until

import distkit as dk
from distkit.cluster.processes.fork_client import LocalForkClient
from distkit.events import Op, State

SCRIPTS = Path(__file__).parents[1] / "stress/programs/scripts"


@pytest.fixture(scope="module")
def cluster() -> Iterator[dk.Cluster]:
    with dk.Cluster(3) as cluster:
        yield cluster


@pytest.fixture
def usable(cluster: dk.Cluster) -> Iterator[dk.Cluster]:
    """A cluster that must still work after the test."""
    yield cluster
    assert cluster.run(sum_over_ranks).results == [6.0, 6.0, 6.0]


def test_cluster_creation_does_not_wait_for_torch(fresh: LocalForkClient) -> None:
    with dk.Cluster(2) as cluster:
        assert "2 ranks" in repr(cluster) and not cluster._supervisor.ready.is_set()
        assert cluster.run(dist.get_world_size).results == [2, 2]


def test_run_returns_results_and_trace(usable: dk.Cluster) -> None:
    run = usable.run(sum_over_ranks)
    assert run.results == [6.0, 6.0, 6.0]
    spans = [s for s in run.trace.spans if s.op is Op.ALL_REDUCE]
    assert [s.rank for s in sorted(spans, key=lambda s: s.rank)] == [0, 1, 2]
    assert all(s.state is State.COMPLETED for s in spans)
    assert len({rank.pid for rank in run.trace.info.ranks.values()}) == 3


def test_events_arrive_during_the_run(usable: dk.Cluster, tmp_path: Path) -> None:
    flag = str(tmp_path / "go")

    def program() -> None:
        dist.barrier()
        while not Path(flag).exists():
            time.sleep(0.01)

    arrived = threading.Event()
    run = usable.submit(program)
    run.subscribe(lambda events: arrived.set())
    assert arrived.wait(10)
    assert not run.finished
    assert len(run.trace) > 0
    with pytest.raises(dk.errors.ClusterError, match="busy with program"):
        usable.submit(sum_over_ranks)
    Path(flag).touch()
    assert run.wait(10).finished


def test_unmodified_ddp_script_is_recorded(
    usable: dk.Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    run = usable.run(SCRIPTS / "ddp_basic.py")
    reduced = [s for s in run.trace.spans if s.op is Op.ALL_REDUCE and s.rank == 0]
    gradient = 10 * 10 + 10 + 10 * 5 + 5
    assert [s.nbytes for s in reduced if s.dtype == "float32"].count(4 * gradient) == 5
    assert all(s.state is State.COMPLETED for s in run.trace.spans)
    assert any("ddp_basic.py:" in s.where for s in reduced)
    assert capsys.readouterr().out.count("[rank 2] loss ") == 5


def test_unmodified_fsdp2_script_is_recorded(usable: dk.Cluster) -> None:
    trace = usable.run(SCRIPTS / "fsdp2.py").trace
    assert {Op.ALL_GATHER, Op.REDUCE_SCATTER} <= {s.op for s in trace.spans}
    assert all(s.state is State.COMPLETED for s in trace.spans)
    gathers = [s for s in trace.spans if s.op is Op.ALL_GATHER and s.rank == 0]
    assert len(gathers) >= 8  # four layers, forward and backward


def test_consecutive_failing_runs_all_report_their_error(usable: dk.Cluster) -> None:
    def program() -> None:
        raise ValueError("on every rank")

    for _ in range(10):
        with pytest.raises(dk.errors.RankError, match="on every rank"):
            usable.submit(program).wait(20)


def test_externally_killed_rank_is_named(usable: dk.Cluster) -> None:
    run = usable.submit(lambda: time.sleep(60))
    os.kill(usable.status().rows[1][2], signal.SIGKILL)
    with pytest.raises(dk.errors.RankDied, match=r"process of rank 1 exited .*SIGKILL"):
        run.wait(30)


def test_native_crash_is_reported_with_its_line(usable: dk.Cluster) -> None:
    def receive() -> None:
        dist.recv(torch.zeros(2), src=0)  # too small: gloo aborts the process

    def program() -> None:
        if dist.get_rank() == 0:
            dist.send(torch.ones(100), dst=1)
        elif dist.get_rank() == 1:
            receive()

    with pytest.raises(dk.errors.RankDied, match="SIGABRT") as caught:
        usable.run(program)
    file, _, line = caught.value.line.rpartition(":")
    assert "too small" in Path(__file__).read_text().splitlines()[int(line) - 1]
    assert file.endswith("test_cluster.py")
    assert "terminate called" in str(caught.value)


def hang() -> None:
    dist.recv(torch.zeros(1), src=(dist.get_rank() + 1) % 3)


def test_next_run_can_start_directly_after_an_interrupt(usable: dk.Cluster) -> None:
    usable.submit(time.sleep, 60)
    usable.interrupt()
    assert usable.run(dist.get_rank).results == [0, 1, 2]


def test_interrupt_reports_the_line_of_each_rank(usable: dk.Cluster, tmp_path: Path) -> None:
    def endless() -> None:
        (tmp_path / str(dist.get_rank())).touch()
        while True:
            pass

    run = usable.submit(endless)
    wait_until(lambda: len(list(tmp_path.iterdir())) == 3)
    usable.interrupt()
    with pytest.raises(dk.errors.RunInterrupted, match=r"were at .*test_cluster\.py:\d+\.$"):
        run.wait(10)


def test_stop_button_interrupts_the_run(usable: dk.Cluster) -> None:
    run = usable.submit(hang, wait_forever=True)

    def press() -> None:
        while not any(f.hang for f in usable.diagnose()):
            run._conductor.finished_event.wait(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt, match=r"in a cycle(?s:.*)stopped on all ranks"):
        threading.Thread(target=press, daemon=True).start()
        run.wait(20)
    assert run.finished


def test_restart_creates_new_processes(usable: dk.Cluster) -> None:
    pids = {row[2] for row in usable.status().rows}
    usable.restart()
    assert pids.isdisjoint({row[2] for row in usable.status().rows})


def test_ranks_draw_different_random_numbers_unless_seeded(usable: dk.Cluster) -> None:
    draw = "torch.rand(1).item()"
    numbers = usable.execute(draw).results + usable.run(lambda: torch.rand(1).item()).results
    usable.restart()
    numbers += usable.execute(draw).results
    assert len({*numbers}) == 9
    seeded = usable.execute(draw, seed=3)
    assert usable.execute(draw).results != seeded.results, "an unseeded cell continues the sequence"
    assert usable.execute(draw, seed=3).results == seeded.results
    assert usable.run(lambda: torch.rand(1).item(), seed=3).results == seeded.results
    assert usable.step(lambda: torch.rand(1).item(), seed=3).finish().results == seeded.results
    assert seeded.trace.info.seed == 3


def test_several_clusters_coexist(usable: dk.Cluster) -> None:
    with dk.Cluster(2) as other:
        one, two = usable.submit(sum_over_ranks), other.submit(sum_over_ranks)
        assert (one.results, two.results) == ([6.0] * 3, [3.0] * 2)


def test_program_can_destroy_and_recreate_the_process_group(usable: dk.Cluster) -> None:
    def program() -> int:
        dist.destroy_process_group()
        dist.init_process_group("gloo")
        return dist.get_world_size()

    assert usable.run(program).results == [3, 3, 3]


def test_wrong_world_size_is_explained(usable: dk.Cluster) -> None:
    with pytest.raises(dk.errors.RankError, match=r"world_size=7.*has world_size=3"):
        usable.run(lambda: dist.init_process_group("gloo", world_size=7))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"ranks": 0}, "at least 1"),
        ({"ranks": 10**7}, "enough for"),
        ({"ranks": 2, "device": "cuda"}, "no GPU"),
        ({"ranks": 2, "device": "tpu"}, "is invalid"),
        ({"ranks": 2, "workers": 2}, "not both"),
        ({"workers": 2, "servers": -1}, "at least 0"),
        ({"ranks": "four"}, "integer"),
    ],
)
def test_invalid_cluster_options_raise(options: dict[str, object], expected: str) -> None:
    if options.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(dk.errors.StartError, match=expected):
        dk.Cluster(**options)  # type: ignore[arg-type]


def test_stop_ends_all_processes_and_later_runs_raise() -> None:
    cluster = dk.Cluster(2)
    cluster.execute("0")
    processes = [psutil.Process(row[2]) for row in cluster.status().rows]
    cluster.stop()
    cluster.stop()
    with pytest.raises(dk.errors.StoppedError, match="Create a new one"):
        cluster.run(sum_over_ranks)
    _, alive = psutil.wait_procs(processes, timeout=5)
    assert not alive
    assert "stopped" in repr(cluster)
    assert cluster.status()._repr_html_().count(">stopped</em>") == 2


def test_cells_run_on_new_engines_after_an_engine_died() -> None:
    with dk.Cluster(2) as cluster:
        cluster.execute("x = 5")
        victim = psutil.Process(cluster.status().rows[0][2])
        victim.kill()
        victim.wait(10)
        wait_until(lambda: not cluster._supervisor.engines.usable)
        assert cluster.run(sum_over_ranks).results == [3.0, 3.0]
        with pytest.warns(dk.errors.CommunicationWarning, match="the variables of %%ranks cells"):
            assert cluster.execute("'x' in globals()").results == [False, False]


def test_cell_is_aborted_if_the_controller_dies() -> None:
    """The cell might not have been delivered to all engines."""
    with dk.Cluster(2) as cluster:
        cluster.execute("import os, threading")
        pid = cluster._supervisor.engines._controller.pid
        with pytest.raises(dk.errors.RunInterrupted, match="the ipyparallel controller exited"):
            cluster.execute(f"if rank == 0: os.kill({pid}, 9)\nthreading.Event().wait()")
        assert cluster.execute("'os' in globals()").results == [False, False]


#: A script that creates a cluster and forks a child to execute each argument. The cluster's threads
#: must not import anything: a child forked during an import could never import that module.
FORKING_SCRIPT = """
import os, sys, threading
import torch.distributed as dist
import distkit as dk

main, imports = threading.main_thread(), []
sys.addaudithook(
    lambda event, args: event == "import"
    and threading.current_thread() is not main
    and imports.append(args[0])
)

with dk.Cluster(2).wait() as cluster:
    stepper = cluster.step(dist.barrier)
    for statement in sys.argv[1:]:
        child = os.fork()
        if not child:
            try:
                exec(statement)
            except dk.errors.DistkitError as error:
                print(f"{type(error).__name__}: {error}")
            sys.exit(3)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    stepper.finish()
    print(cluster.run(dist.get_rank).results, cluster.restart().run(dist.get_rank).results, imports)
"""
STOPPED = "StoppedError: the cluster was stopped, or belongs to another process. Create a new one."
#: The statements that the children execute, and the text that each prints.
CHILD_OUTPUT = {
    "pass": "",
    "cluster.stop()": "",
    "cluster.run(dist.get_rank)": f"{STOPPED}\n",
    "cluster.restart()": f"{STOPPED}\n",
    "print(dk.Cluster(3).run(dist.get_world_size).results)": "[3, 3, 3]\n",
    "print(dk.run_ranks(dist.get_world_size, 3).results)": "[3, 3, 3]\n",
}


def test_forked_child_cannot_use_its_parents_cluster() -> None:
    command = [sys.executable, "-c", FORKING_SCRIPT, *CHILD_OUTPUT]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=500)
    expected = [*CHILD_OUTPUT.values(), "[0, 1] [0, 1] []\n"]
    assert completed.stdout == "".join(expected), completed.stderr
    assert "Traceback" not in completed.stderr


def test_deleting_a_cluster_stops_it() -> None:
    cluster = dk.Cluster(2)
    cluster.execute("0")
    process = psutil.Process(cluster.status().rows[0][2])
    del cluster
    process.wait(5)


def test_irecv_request_can_be_awaited_in_a_later_cell(usable: dk.Cluster) -> None:
    usable.execute("x = torch.zeros(2)\nif rank == 1: req = dist.irecv(x, src=0)")
    usable.execute("dist.send(torch.ones(2), dst=1) if rank == 0 else rank == 1 and req.wait()")
    assert usable.execute("x[0].item()", [1]).results == [None, 1.0, None]
