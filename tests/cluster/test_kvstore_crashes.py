"""Runs in which workers, servers or the scheduler of a cluster crash."""

from __future__ import annotations

import itertools
import os
import signal
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import waiting
from training import sum_over_ranks

import distkit as dk
from distkit import kvstore
from distkit.events import Op
from distkit.kvstore.client.requests import Requests
from distkit.views.servers.projection import project
from distkit.views.servers.scene import draw

wait_until = partial(waiting.wait_until, timeout=60)


@pytest.fixture(scope="module")
def cluster() -> Iterator[dk.Cluster]:
    with dk.Cluster(workers=2, servers=2) as cluster:
        yield cluster


def push_ones(mode: str, dying_rank: int | None = None, **options) -> float:
    kv = kvstore.create(mode, **options)
    kv.set_optimizer(kvstore.SGD(learning_rate=-1))
    kv.init("w", torch.zeros(4))
    for n in range(50):
        kv.pushpull("w", torch.ones(4))
        if n == 9 and kv.rank == dying_rank:
            os.kill(os.getpid(), signal.SIGKILL)
    kv.barrier()
    return kv.pull("w")[0].item()


@pytest.mark.parametrize(
    ("mode", "options"),
    [("dist_async", {}), ("dist_sync", {"on_crash": "continue"}), ("dist_sync", {"backup": 1})],
)
def test_other_workers_continue_without_a_dead_worker(cluster, mode: str, options) -> None:
    with pytest.warns(dk.errors.CommunicationWarning, match="worker 1 exited"):
        run = cluster.run(push_ones, mode, 1, **options)
    assert run.results[0] >= 50 and run.results[1] is None
    assert run.results[0] == 60 or options == {"backup": 1}  # late gradients are dropped
    assert run.trace.info.ends[1].how == "died"
    assert cluster.run(push_ones, mode).results == [100, 100]


def files_of_runs() -> list[str]:
    folder = Path(os.environ["TORCHELASTIC_ERROR_FILE"]).parent
    return [path.name for path in folder.glob("run-*")]


def test_sockets_are_removed_after_the_run(cluster) -> None:
    first, second = (cluster.run(files_of_runs).results[0] for _ in range(2))
    assert first and second and not {*first} & {*second}


def push_for_a_while(flag: str, rounds: int = 200, **options) -> list[float]:
    """Push for some rounds, while the test kills a process."""
    kv = kvstore.create("dist_async", **options)
    kv.set_optimizer(kvstore.SGD(learning_rate=-1))
    keys = list(range(6))
    kv.init(keys, [torch.zeros(30_000)] * 6)
    sent = 0
    while rounds:
        kv.push(keys, [torch.ones(30_000)] * 6)
        kv.pull(keys)
        sent += 1
        if sent == 5 and kv.rank == 0:
            Path(flag).touch()
        rounds -= 1
    kv.barrier()
    return [v.unique().item() for v in kv.pull(keys)]


def test_killed_server_is_replaced_by_its_backup(cluster, tmp_path) -> None:
    flag = tmp_path / "now"
    run = cluster.submit(push_for_a_while, str(flag), replication=2)
    wait_until(flag.exists)
    cluster.kill("server 0")
    with pytest.warns(
        dk.errors.CommunicationWarning, match="server 0 exited .* its backup took over"
    ):
        assert run.results == [[400.0] * 6] * 2
    projection = project(run.trace)
    assert "server 0 died and had to be replaced" in projection.notices
    last = [versions[-1][1] for versions in projection.history.versions.values() if versions]
    assert last == [400] * 6
    pending = [g for g in projection.history.gradients if g.applied > projection.end]
    assert len(pending) <= 12  # the killed server's last events may be missing
    assert cluster.run(push_ones, "dist_sync", replication=2).results == [100, 100]


def die_early(phase: str, **options) -> float:
    """Kill worker 0, which initializes the values, before it calls init."""
    dies = int(os.environ["RANK"]) == 0
    if dies and phase == "create":
        os.kill(os.getpid(), signal.SIGKILL)
    kv = kvstore.create(**options)
    if dies:
        os.kill(os.getpid(), signal.SIGKILL)
    kv.init(["v", "w"], [torch.full((3,), 5.0), torch.full((2000,), 5.0)])
    kv.set_optimizer(kvstore.SGD(learning_rate=-1))
    kv.push(["v", "w"], [torch.ones(3), torch.ones(2000)])
    v, w = kv.pull(["v", "w"])
    assert torch.equal(w, torch.full((2000,), 6.0))
    return v[0].item()


@pytest.mark.parametrize(
    ("phase", "options"),
    [("create", {"name": "dist_sync", "on_crash": "continue"}), ("init", {"name": "dist_async"})],
)
def test_worker_that_dies_before_init_does_not_hang_the_others(
    cluster, phase: str, options
) -> None:
    run = cluster.submit(die_early, phase, bigarray_bound=100, **options)
    with warnings.catch_warnings(record=True) as received:
        warnings.simplefilter("always")
        try:
            results = run.wait(60).results
        except dk.errors.RankError as error:  # worker 1 ran before the message to continue arrived
            reported = error.run.trace.info.ends[1].text
            assert phase == "create" or "waits for the value of worker 0" in reported
        else:
            assert phase == "create" and results == [None, 6.0]
            assert any("worker 0 exited" in str(warning.message) for warning in received)
    assert cluster.run(push_ones, "dist_sync").results == [100, 100]


def die_before_reply(mode: str, on_crash: str, folder: str) -> None:
    """Kill worker 1 when the reply to its second push arrives."""
    kv = kvstore.create(mode, on_crash=on_crash)
    kv.set_optimizer(kvstore.SGD(learning_rate=-1))
    kv.init("w", torch.zeros(4))
    for n in range(3):
        flag = Path(folder, "died")
        if n == 1 and kv.rank == 1 and not flag.exists():
            flag.touch()
            Requests._complete = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        kv.push("w", torch.ones(4))
        kv.pull("w")


def test_push_accepted_before_a_crash_is_not_shown_as_rejected(cluster, tmp_path) -> None:
    with pytest.warns(dk.errors.CommunicationWarning, match="1 exited"):
        run = cluster.run(die_before_reply, "dist_sync", "replace", str(tmp_path))
    assert not any("refused" in notice for notice in draw(run.trace)["notices"])


# -- replacement during a run ----------------------------------------------------------


def push_50_times(mode: str, folder: str, deaths: int = 1) -> tuple[float, int]:
    """Push 50 times; worker 1 dies ``deaths`` times, each after 10 pushes, and then pushes 40."""
    kv = kvstore.create(mode, on_crash="replace")
    kv.set_optimizer(kvstore.SGD(learning_rate=-1))
    kv.init("w", torch.zeros(4))
    lives = Path(folder, f"life-{kv.rank}")
    life = len(lives.read_text()) if lives.exists() else 0
    lives.write_text("x" * (life + 1))
    for n in range(50 if life == 0 else 40):
        kv.pushpull("w", torch.ones(4))
        if n == 9 and kv.rank == 1 and life < deaths:
            os.kill(os.getpid(), signal.SIGKILL)
    kv.barrier()
    return kv.pull("w")[0].item(), life


def repeat_the_loop(folder: str, mode: str, barrier: bool) -> float:
    """Run the whole loop, even as a replacement, although the others have fewer steps left."""
    kv = kvstore.create(mode, on_crash="replace")
    assert dk.data.shard(torch.arange(4))[0].tolist() == [kv.rank, kv.rank + 2]
    kv.set_optimizer(kvstore.SGD(learning_rate=-1))
    kv.init("w", torch.zeros(4))
    for n in range(20):
        value = kv.pushpull("w", torch.ones(4))[0].item()
        if barrier:
            kv.barrier()
        if n == 9 and kv.rank == 1 and not Path(folder, "died").exists():
            Path(folder, "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
    return value


@pytest.mark.parametrize(
    ("mode", "barrier"),
    [("dist_sync", True), ("dist_async", False)],
)
def test_replacement_may_run_more_steps_than_the_others(
    cluster, tmp_path, mode: str, barrier: bool
) -> None:
    with pytest.warns(dk.errors.CommunicationWarning, match="worker 1 exited"):
        run = cluster.run(repeat_the_loop, str(tmp_path), mode, barrier)
    assert run.results[1] == 50 or (mode == "dist_async" and max(run.results) == 50)


@pytest.mark.parametrize("mode", ["dist_async", "dist_sync"])
def test_dead_worker_is_replaced_and_restarts_the_program(cluster, mode: str, tmp_path) -> None:
    with pytest.warns(
        dk.errors.CommunicationWarning, match=r"worker 1 exited .* \(signal SIGKILL\), and"
    ):
        run = cluster.run(push_50_times, mode, str(tmp_path))
    assert run.results == [(100, 0), (100, 1)]
    (node,) = run.trace.info.replaced
    assert (node.node, node.name, node.how) == (1, "worker 1", "signal SIGKILL")
    spans = [s for s in run.trace.spans if s.rank == 1]
    assert all(s.end is not None for s in spans)
    (gap,) = [s for s in spans if s.label == "replaced"]
    assert len({s.match for s in spans if s.op is Op.REGISTER}) == 2
    assert any(s.start > gap.end for s in spans)
    assert cluster.run(push_ones, mode).results == [100, 100]
    assert cluster.run(sum_over_ranks).results == [3, 3]  # the group is complete again


def test_worker_that_dies_repeatedly_ends_the_run(cluster, tmp_path) -> None:
    with pytest.raises(dk.errors.RankDied, match=r"\(signal SIGKILL\)"):
        cluster.run(push_50_times, "dist_sync", str(tmp_path), 99)
    assert Path(tmp_path, "life-1").read_text() == "x" * 4
    assert cluster.run(push_ones, "dist_sync").results == [100, 100]


def all_reduce_after_replacement(folder: str) -> None:
    kv = kvstore.create("dist_sync", on_crash="replace")
    first, second = Path(folder, "first"), Path(folder, "second")
    if kv.rank == 1 and not first.exists():
        first.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    second.touch() if kv.rank == 1 else wait_until(second.exists)
    dist.all_reduce(torch.ones(1))


def test_replacement_cannot_join_the_process_group(cluster, tmp_path) -> None:
    with pytest.raises(dk.errors.RankError, match="and a new process cannot join it"):
        cluster.run(all_reduce_after_replacement, str(tmp_path))
    assert cluster.run(sum_over_ranks).results == [3, 3]


def push_forever(flag: str) -> None:
    kv = kvstore.create("dist_sync")
    kv.set_optimizer(kvstore.SGD(learning_rate=-1))
    kv.init("w", torch.zeros(1))
    for n in itertools.count():
        kv.push("w", torch.ones(1))
        kv.barrier()
        kv.pull("w")
        if n == 20 and kv.rank == 0:
            Path(flag).touch()


def test_killed_scheduler_ends_the_run_with_an_error(cluster, tmp_path) -> None:
    run = cluster.submit(push_forever, str(tmp_path / "now"))
    wait_until((tmp_path / "now").exists)
    cluster.kill("scheduler")
    with pytest.raises(dk.errors.RunError, match=r"the scheduler has exited \(signal SIGKILL\)"):
        run.wait(60)
    assert cluster.run(push_ones, "dist_async").results == [100, 100]


# -- before the start of a run ---------------------------------------------------------


def test_registration_of_each_node_is_recorded(cluster) -> None:
    """Servers register before the workers receive the function."""
    for _ in range(4):
        spans = cluster.run(push_ones, "dist_sync").trace.spans
        sent = {s.match for s in spans if s.op is Op.REGISTER}
        received = {s.match for s in spans if s.op is Op.RECV and s.rank == 4}
        assert len(sent) == 4
        assert sent <= received


def start_late(flag: str, **options) -> float:
    """Push ones; worker 1 creates its store only after the test has created ``flag``."""
    if int(os.environ["RANK"]) == 1:
        wait_until(Path(flag).exists)
    return push_ones("dist_async", **options)


def test_server_that_dies_before_the_start_ends_the_run(cluster, tmp_path) -> None:
    run = cluster.submit(start_late, str(tmp_path / "go"), replication=2)
    wait_until(lambda: any(e.op is Op.REGISTER and e.rank == 0 for e in run.trace.events))
    cluster.kill("server 1")
    with pytest.raises(dk.errors.RunError, match="server 1 has exited"):
        run.wait(60)
    assert cluster.run(push_ones, "dist_sync").results == [100, 100]
