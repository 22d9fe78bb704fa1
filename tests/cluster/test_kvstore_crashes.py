"""Deaths of workers, servers and schedulers in a cluster, and the rest of the run."""

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

import distkit as dk
from distkit import kvstore
from distkit.events import Op
from distkit.kvstore.client.requests import Requests
from distkit.views.servers.projection import project
from distkit.views.servers.scene import draw

until = partial(waiting.until, timeout=60)


@pytest.fixture(scope="module")
def cluster() -> Iterator[dk.Cluster]:
    with dk.Cluster(workers=2, servers=2) as cluster:
        yield cluster


def adds(mode: str, dies: int | None = None, **options) -> float:
    kv = kvstore.create(mode, **options)
    kv.set_optimizer(kvstore.SGD(learning_rate=-1))
    kv.init("w", torch.zeros(4))
    for n in range(50):
        kv.pushpull("w", torch.ones(4))
        if n == 9 and kv.rank == dies:
            os.kill(os.getpid(), signal.SIGKILL)
    kv.barrier()
    return kv.pull("w")[0].item()


@pytest.mark.parametrize(
    ("mode", "options"),
    [("dist_async", {}), ("dist_sync", {"on_crash": "continue"}), ("dist_sync", {"backup": 1})],
)
def test_other_workers_continue_without_a_dead_worker(cluster, mode: str, options) -> None:
    with pytest.warns(dk.errors.CommunicationWarning, match="rank 1 ended"):
        run = cluster.run(adds, mode, 1, **options)
    assert run.results[0] >= 50 and run.results[1] is None
    assert run.results[0] == 60 or options == {"backup": 1}  # which drops late gradients
    assert run.trace.info.ends[1].how == "died"
    assert cluster.run(adds, mode).results == [100, 100]


def goes_on(flag: str, rounds: int = 200, **options) -> list[float]:
    """Push until the test has killed a process, and for some more rounds."""
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
    run = cluster.submit(goes_on, str(flag), replication=2)
    until(flag.exists)
    cluster.kill("server 0")
    with pytest.warns(
        dk.errors.CommunicationWarning, match="server 0 ended .* its backup took over"
    ):
        assert run.results == [[400.0] * 6] * 2
    shown = project(run.trace)
    assert "server 0 died and had to be replaced" in shown.notices
    last = [versions[-1][1] for versions in shown.history.versions.values() if versions]
    assert last == [400] * 6
    lying = [g for g in shown.history.gradients if g.applied > shown.end]
    assert len(lying) <= 12  # an update lost with its server
    assert cluster.run(adds, "dist_sync", replication=2).results == [100, 100]


def dies_early(when: str, **options) -> float:
    """Worker 0, which initializes the values, ends before init."""
    dies = int(os.environ["RANK"]) == 0
    if dies and when == "create":
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
    ("when", "options"),
    [("create", {"name": "dist_sync", "on_crash": "continue"}), ("init", {"name": "dist_async"})],
)
def test_worker_that_ends_before_registration_hangs_no_rank(cluster, when: str, options) -> None:
    run = cluster.submit(dies_early, when, bigarray_bound=100, **options)
    with warnings.catch_warnings(record=True) as received:
        warnings.simplefilter("always")
        try:
            results = run.wait(60).results
        except dk.errors.RankError as error:  # or it was faster than the message to continue
            reported = error.run.trace.info.ends[1].text
            assert when == "create" or "waits for the value of worker 0" in reported
        else:
            assert when == "create" and results == [None, 6.0]
            assert any("rank 0 ended" in str(warning.message) for warning in received)
    assert cluster.run(adds, "dist_sync").results == [100, 100]


def dies_unheard(mode: str, on_crash: str, folder: str) -> None:
    """Worker 1 dies when the reply to its second push arrives."""
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


def test_accepted_push_survives_its_worker(cluster, tmp_path) -> None:
    with pytest.warns(dk.errors.CommunicationWarning, match="1 ended"):
        run = cluster.run(dies_unheard, "dist_sync", "replace", str(tmp_path))
    picture = draw(project(run.trace))
    assert not any("refused" in notice for notice in picture["notices"])


# -- in the middle of a run: others take their places --------------------------------


def begins_again(mode: str, folder: str, dies: int = 1) -> tuple[float, int]:
    """Each worker pushes 50 times; one dies at its 10th push, once."""
    kv = kvstore.create(mode, on_crash="replace")
    kv.set_optimizer(kvstore.SGD(learning_rate=-1))
    kv.init("w", torch.zeros(4))
    lives = Path(folder, f"life-{kv.rank}")
    life = len(lives.read_text()) if lives.exists() else 0
    lives.write_text("x" * (life + 1))
    for n in range(50 if life == 0 else 40):
        kv.pushpull("w", torch.ones(4))
        if n == 9 and kv.rank == 1 and life < dies:
            os.kill(os.getpid(), signal.SIGKILL)
    kv.barrier()
    return kv.pull("w")[0].item(), life


def the_same_again(folder: str, mode: str, meets: str) -> float:
    """A replacement runs the whole loop; the others have fewer steps left."""
    kv = kvstore.create(mode, on_crash="replace")
    assert dk.data.shard(torch.arange(4))[0].tolist() == [kv.rank, kv.rank + 2]
    kv.set_optimizer(kvstore.SGD(learning_rate=-1))
    kv.init("w", torch.zeros(4))
    for n in range(20):
        value = kv.pushpull("w", torch.ones(4))[0].item()
        if meets == "each time":
            kv.barrier()
        if n == 9 and kv.rank == 1 and not Path(folder, "died").exists():
            Path(folder, "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
    return value


@pytest.mark.parametrize(
    ("mode", "meets"),
    [("dist_sync", "each time"), ("dist_async", "never")],
)
def test_replacement_may_have_more_steps(cluster, tmp_path, mode: str, meets: str) -> None:
    with pytest.warns(dk.errors.CommunicationWarning, match="worker 1 ended"):
        run = cluster.run(the_same_again, str(tmp_path), mode, meets)
    assert run.results[1] == 50 or (mode == "dist_async" and max(run.results) == 50)


@pytest.mark.parametrize("mode", ["dist_async", "dist_sync"])
def test_dead_worker_is_replaced_and_starts_again(cluster, mode: str, tmp_path) -> None:
    with pytest.warns(
        dk.errors.CommunicationWarning, match=r"worker 1 ended .* \(signal SIGKILL\), and"
    ):
        run = cluster.run(begins_again, mode, str(tmp_path))
    assert run.results == [(100, 0), (100, 1)]
    (reported,) = run.trace.info.replaced
    assert (reported.node, reported.name, reported.how) == (1, "worker 1", "signal SIGKILL")
    spans = [s for s in run.trace.spans if s.rank == 1]
    assert all(s.end is not None for s in spans)
    (vacant,) = [s for s in spans if s.label == "replaced: signal SIGKILL"]
    assert len({s.match for s in spans if s.op is Op.REGISTER}) == 2
    assert any(s.start > vacant.end for s in spans)
    assert cluster.run(adds, mode).results == [100, 100]
    assert cluster.run(sums_up).results == [1, 1]  # the group is complete again


def sums_up() -> float:
    x = torch.full((1,), float(dist.get_rank()))
    dist.all_reduce(x)
    return x.item()


def test_worker_that_always_dies_ends_the_run(cluster, tmp_path) -> None:
    with pytest.raises(dk.errors.RankDied, match=r"\(signal SIGKILL\)"):
        cluster.run(begins_again, "dist_sync", str(tmp_path), 99)
    assert Path(tmp_path, "life-1").read_text() == "x" * 4
    assert cluster.run(adds, "dist_sync").results == [100, 100]


def reduces_too(folder: str) -> None:
    kv = kvstore.create("dist_sync", on_crash="replace")
    first, second = Path(folder, "first"), Path(folder, "second")
    if kv.rank == 1 and not first.exists():
        first.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    second.touch() if kv.rank == 1 else until(second.exists)
    dist.all_reduce(torch.ones(1))


def test_process_group_does_not_accept_a_replacement(cluster, tmp_path) -> None:
    with pytest.raises(dk.errors.RankError, match="and a new process cannot join it"):
        cluster.run(reduces_too, str(tmp_path))
    assert cluster.run(sums_up).results == [1, 1]


def meets(flag: str) -> None:
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
    run = cluster.submit(meets, str(tmp_path / "now"))
    until((tmp_path / "now").exists)
    cluster.kill("scheduler")
    with pytest.raises(dk.errors.RunError, match=r"the scheduler has ended \(signal SIGKILL\)"):
        run.wait(60)
    assert cluster.run(adds, "dist_async").results == [100, 100]


# -- before the beginning, and once more ----------------------------------------------


def begins_late(flag: str, **options) -> float:
    """Worker 1 creates its store when the test allows it."""
    if int(os.environ["RANK"]) == 1:
        until(Path(flag).exists)
    return adds("dist_async", **options)


def test_server_that_ends_before_the_start_ends_the_run(cluster, tmp_path) -> None:
    run = cluster.submit(begins_late, str(tmp_path / "go"), replication=2)
    until(lambda: any(e.op is Op.REGISTER and e.rank == 0 for e in run.trace.events))
    cluster.kill("server 1")
    with pytest.raises(dk.errors.RunError, match="server 1 has ended"):
        run.wait(60)
    assert cluster.run(adds, "dist_sync").results == [100, 100]
