"""Stepping through pushes and pulls, and hangs of workers."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import distkit as dk
from distkit import kvstore
from distkit.cluster import Run, Stepper
from distkit.events import Event, Op, State


@pytest.fixture(scope="module")
def cluster() -> Iterator[dk.Cluster]:
    with dk.Cluster(workers=3, servers=2) as cluster:
        yield cluster


@pytest.fixture
def usable(cluster: dk.Cluster) -> Iterator[dk.Cluster]:
    """A cluster that must still work after the test."""
    yield cluster
    assert cluster.run(total).results == [6.0] * 3


def total() -> float:
    kv = kvstore.create("dist_sync")
    kv.init("w", torch.zeros(1))
    return kv.pushpull("w", torch.ones(1) * (kv.rank + 1)).item()


def train(mode: str, rounds: int = 2, **options) -> list[float]:
    """Push a value that depends on the pulled value and the rank; return the pulled values."""
    kv = kvstore.create(mode, **options)
    kv.set_optimizer(kvstore.SGD(learning_rate=-1))
    kv.init("w", torch.zeros(4))
    seen = []
    for _ in range(rounds):
        w = kv.pull("w")
        seen.append(w[0].item())
        kv.push("w", w * kv.rank + kv.rank + 1)
    kv.barrier()
    return [*seen, kv.pull("w")[0].item()]


def status(stepper: Stepper) -> list[str]:
    return [str(s.status) for s in stepper.moment.rank_states]


def calls(stepper: Stepper) -> list[str]:
    return [s.call() for s in stepper.moment.rank_states]


def events_so_far(stepper: Stepper) -> list[Event]:
    return stepper.trace.events[: stepper.moment.events]


def step_to(op: Op, stepper: Stepper) -> Stepper:
    """Step until every worker is paused before this operation."""
    while others := [
        s.rank for s in stepper.moment.rank_states if not (s.event and s.event.op is op)
    ]:
        for rank in others:
            stepper.next(rank)
    return stepper


def staleness(run: Run) -> list[int]:
    """Return the staleness of each gradient, in the order of the updates."""
    return [max(s.attributes["stale_by"]) for s in run.trace.spans if "version" in s.attributes]


# -- stepping -----------------------------------------------------------------------------


def test_each_call_of_the_store_is_one_step(usable: dk.Cluster) -> None:
    stepper = usable.step(train, "dist_sync", 1)
    seen = [calls(stepper)[0]]
    while not stepper.next().finished:
        assert len(set(calls(stepper))) == 1, "no call blocks when all workers step together"
        seen.append(calls(stepper)[0])
        assert status(stepper) == ["paused"] * 3
    assert seen == [
        "set_optimizer(sgd)",
        "init('w')",
        "pull('w')",
        "push('w')",
        "barrier()",
        "pull('w')",
    ]
    run = stepper.finish()
    assert run.results == [[0.0, 6.0]] * 3
    files = {Path(span.where.rpartition(":")[0]).name for span in run.trace.spans}
    assert files == {Path(__file__).name, ""}, "no line of distkit itself is shown"


def push_and_pull_two_keys() -> float:
    """Push and pull two keys in one call; one key is split across both servers."""
    kv = kvstore.create("dist_sync", bigarray_bound=4)
    kv.init(["w", "b"], [torch.zeros(8), torch.zeros(2)])
    w, b = kv.pushpull(["w", "b"], [torch.ones(8), torch.ones(2)])
    return w.sum().item() + b.sum().item()


def test_call_with_several_keys_and_parts_is_one_step(usable: dk.Cluster) -> None:
    stepper = usable.step(push_and_pull_two_keys)
    seen = [calls(stepper)[0]]
    while not stepper.next().finished:
        seen.append(calls(stepper)[0])
    assert seen == [f"{op}(['w', 'b'])" for op in ("init", "push", "pull")]
    assert stepper.finish().results == [30.0] * 3
    pushes = [s.label for s in stepper.trace.spans if s.op is Op.PUSH and s.rank == 0]
    assert pushes == ["w", "w", "b"], "the trace contains each part, as without stepping"


def test_pull_is_blocked_until_every_worker_has_pushed(usable: dk.Cluster) -> None:
    stepper = step_to(Op.PUSH, usable.step(train, "dist_sync")).next(rank=0)
    stepper.next(rank=0)
    mine = stepper.moment.rank_states[0]
    assert status(stepper) == ["blocked", "paused", "paused"]
    assert mine.waits_for == (1, 2) and mine.call() == "pull('w')"
    assert mine.event is not None
    stepper.next(rank=1)
    where = stepper.moment.rank_states[2].where
    server = stepper.trace.info.ranks[mine.event.peer].name
    assert stepper.moment.rank_states[0].reason == (
        f"{server} waits for worker 2, which is paused before push('w') at {where}"
    )
    assert "test_kvstore_stepping.py:" in where
    stepper.next(rank=2)
    assert status(stepper) == ["paused"] * 3 and calls(stepper)[0] == "push('w')"
    updates = [e for e in events_so_far(stepper) if e.op is Op.MARK and e.state is State.COMPLETED]
    assert len(updates) == 1, "the moment includes the servers' events"
    assert not [e for e in events_so_far(stepper.back()) if e.op is Op.MARK]
    assert stepper.seek(-1).finish().results[0][1] == 6.0


ONE_BY_ONE = [0, 0, 1, 1, 2, 2], [0, 0, 0]
TOGETHER = [0, 1, 2, 2, 1, 0], [0, 1, 2]


@pytest.mark.parametrize(("order", "stale"), [ONE_BY_ONE, TOGETHER])
def test_order_of_pushes_determines_staleness(
    usable: dk.Cluster, order: list[int], stale: list[int]
) -> None:
    stepper = step_to(Op.PULL, usable.step(train, "dist_async", 1))
    for rank in order:
        stepper.next(rank)
    assert staleness(stepper.finish()) == stale


# -- hangs --------------------------------------------------------------------------------


def push_and_pull(mode: str = "dist_sync", more: int = 0, **options) -> None:
    """Push and pull three times, and ``more`` additional times on worker 2."""
    kv = kvstore.create(mode, **options)
    kv.set_optimizer(kvstore.SGD(learning_rate=-1))
    kv.init("w", torch.zeros(4))
    for _ in range(3 + more * (kv.rank == 2)):
        kv.push("w", torch.ones(4))
        kv.pull("w")


def omit_call(what: str, who: int) -> None:
    """Push and pull once; worker ``who`` returns before the call ``what``."""
    omitted = what if dist.get_rank() == who else ""
    if omitted == "create":
        return
    kv = kvstore.create("dist_sync")
    if omitted == "init":
        return
    kv.init("w", torch.zeros(4))
    kv.push("w", torch.ones(4))
    kv.pull("w")
    if omitted != "barrier":
        kv.barrier()


HANGS = [
    (push_and_pull, dict(more=-1), "missing_push", (2,), (0, 1), "worker 2 has pushed it 2 times"),
    (
        push_and_pull,
        dict(more=1),
        "missing_push",
        (2,),
        (2,),
        "workers 0 and 1 have pushed it 3 times",
    ),
    (
        push_and_pull,
        dict(mode="dist_async", staleness=0, more=-1),
        "missing_push",
        (2,),
        (0, 1),
        "until every worker has pushed it 3 times",
    ),
    (omit_call, dict(what="init", who=0), "missing_init", (0,), (1, 2), "the value of worker 0"),
    (omit_call, dict(what="create", who=2), "missing_worker", (2,), (0, 1), "without calling it"),
    (omit_call, dict(what="barrier", who=0), "missing_barrier", (0,), (1, 2), "barrier()"),
]


@pytest.mark.parametrize(("program", "arguments", "kind", "culprits", "waiting", "message"), HANGS)
def test_worker_hang_is_explained(
    usable: dk.Cluster, program, arguments, kind, culprits, waiting, message
) -> None:
    with pytest.raises(dk.errors.DeadlockError) as caught:
        usable.run(program, **arguments)
    (finding,) = caught.value.findings
    assert (finding.kind, finding.culprits, finding.waiting) == (kind, culprits, waiting)
    assert message in finding.message and finding.remedy
    assert finding.lines.keys() >= set(waiting)
    assert all("test_kvstore_stepping.py:" in line for line in finding.lines.values())
    assert all(line in finding.message for line in finding.lines.values())
    assert [f for f in caught.value.run.findings if f.hang] == [finding]


def push_late(mode: str, flag: str, **options) -> None:
    """Delay worker 2 between its second pull and push, until the test creates the flag."""
    kv = kvstore.create(mode, **options)
    kv.set_optimizer(kvstore.SGD(learning_rate=-1))
    kv.init("w", torch.zeros(4))
    for n in range(3):
        kv.pull("w")
        if n < 2:  # without it, a slow worker may be alone in a round
            kv.barrier()
        while kv.rank == 2 and n == 1 and not Path(flag).exists():
            time.sleep(0.01)
        kv.push("w", torch.ones(4))


@pytest.mark.parametrize(
    "options",
    [
        dict(mode="dist_sync", backup=1),
        dict(mode="dist_async", staleness=0),
    ],
)
def test_slow_worker_is_not_a_hang(usable: dk.Cluster, tmp_path: Path, options) -> None:
    """The other workers finish or wait, and no hang is found."""
    flag = tmp_path / "continue"
    run = usable.submit(push_late, flag=str(flag), **options)
    conductor = run._conductor
    if "backup" in options:
        conductor._wait_until(lambda: set(conductor.unfinished) == {2}, 30)
    else:
        conductor._wait_until(lambda: conductor.watchdog._checked_at > 0 or run.finished, 30)
        assert {r for f in run.findings for r in f.waiting} == {0, 1}
    assert not run.finished, run.error
    assert [f for f in run.findings if f.hang] == []
    flag.touch()
    run.wait(60)


def die_in_round_3(rank: int) -> None:
    kv = kvstore.create("dist_sync")
    kv.init("w", torch.zeros(4))
    for n in range(4):
        kv.push("w", torch.ones(4))
        kv.pull("w")
        if n == 2 and kv.rank == rank:
            os.kill(os.getpid(), signal.SIGKILL)


def test_worker_crash_ends_a_dist_sync_run(usable: dk.Cluster) -> None:
    with pytest.raises(dk.errors.RankDied, match="worker 1") as caught:
        usable.run(die_in_round_3, 1)
    assert 'on_crash="continue"' in str(caught.value)
    (finding,) = [f for f in caught.value.run.findings if f.hang]
    assert (finding.kind, finding.culprits) == ("died", (1,))
    assert finding.waiting == (0, 2) and "wait in pull('w') at " in finding.message


# -- stepping while a worker dies ---------------------------------------------------------


def kill(cluster: dk.Cluster, rank: int) -> None:
    os.kill(cluster.status().rows[rank][2], signal.SIGKILL)


def wait_for_state(stepper: Stepper, rank: int, text: str) -> None:
    """Wait, without stepping, until a rank's state contains ``text``."""
    seen = threading.Event()
    stepper.watch(seen.set)
    while text not in str(stepper.moment.rank_states[rank]):
        assert seen.wait(30), stepper
        seen.clear()


def test_killed_paused_worker_is_reported_immediately(usable: dk.Cluster) -> None:
    stepper = step_to(Op.PUSH, usable.step(train, "dist_sync", on_crash="continue"))
    moments = len(stepper.moments)
    kill(usable, 1)
    wait_for_state(
        stepper,
        1,
        "worker 1: died: signal SIGKILL; last seen before push('w') at ",
    )
    assert len(stepper.moments) == moments and status(stepper) == ["paused", "died", "paused"]
    with pytest.raises(dk.errors.StepError, match=r"not paused .* worker 1: died: signal SIGKILL"):
        stepper.next(rank=1)
    stepper.next()
    assert calls(stepper) == ["pull('w')", "", "pull('w')"]
    stepper.next(rank=0).next(rank=2)  # the server may not have noticed the death yet
    assert status(stepper)[1] == "died" and not stepper.finished
    with pytest.warns(dk.errors.CommunicationWarning, match="worker 1 exited"):
        zero, one, two = stepper.finish().results
    assert one is None and zero[-1] == two[-1]


def test_worker_killed_in_a_step_does_not_stop_the_others(usable: dk.Cluster) -> None:
    """The worker dies in the step after set_optimizer, init and pull."""
    with dk.inject_faults(kill={1: 3}):
        stepper = usable.step(train, "dist_async")
        for n in range(6):
            stepper.next()
            assert status(stepper)[1] == ("died" if n > 2 else "paused")
            assert not stepper.finished and "failed" not in status(stepper)
    assert "dk.inject_faults killed it, as requested" in repr(stepper)
    with pytest.warns(dk.errors.CommunicationWarning, match="as requested.; last seen before push"):
        stepper.finish()


def test_stepped_worker_is_not_replaced_when_it_dies(usable: dk.Cluster) -> None:
    stepper = step_to(Op.PUSH, usable.step(train, "dist_async", on_crash="replace"))
    kill(usable, 1)
    with pytest.raises(dk.errors.RankDied, match="worker 1"):
        stepper.finish()
