"""Stepping through programs: paused and blocked ranks, past moments, errors."""

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
from torch.distributed._functional_collectives import all_reduce

import distkit as dk
from distkit.cluster import Stepper
from distkit.diagnosis.rank_state import RankStatus
from distkit.events import Event, Op, State

SCRIPTS = Path(__file__).parents[1] / "stress/programs/scripts"


@pytest.fixture(scope="module")
def cluster() -> Iterator[dk.Cluster]:
    with dk.Cluster(3) as cluster:
        yield cluster


@pytest.fixture
def usable(cluster: dk.Cluster) -> Iterator[dk.Cluster]:
    """A cluster that must still work after the test."""
    yield cluster
    assert cluster.run(dist.get_rank).results == [0, 1, 2]


def pass_on() -> float:
    """Send a tensor 0 → 1 → 2, then all-reduce."""
    me, x = dist.get_rank(), torch.zeros(3)
    if me > 0:
        dist.recv(x, src=me - 1)
    x += 1
    if me < 2:
        dist.send(x, dst=me + 1)
    dist.all_reduce(x)
    return x[0].item()


def status(stepper: Stepper) -> list[str]:
    return [str(s.status) for s in stepper.moment.rank_states]


def calls(stepper: Stepper) -> list[str]:
    return [s.call() for s in stepper.moment.rank_states]


def events_so_far(stepper: Stepper) -> list[Event]:
    return stepper.trace.events[: stepper.moment.events]


def ring_all_reduce() -> float:
    x = torch.ones(3) * (dist.get_rank() + 1)
    with dk.algorithms.use_algorithm("ring"):
        dist.all_reduce(x)
    return x[0].item()


def test_algorithm_calls_are_steps(usable: dk.Cluster) -> None:
    stepper = usable.step(ring_all_reduce)
    assert calls(stepper) == ["all_reduce()"] * 3
    stepper.next()
    assert calls(stepper) == [f"send(dst={(r + 1) % 3})" for r in range(3)]
    assert stepper.finish().results == [6.0] * 3


def test_library_call_names_the_calling_line(usable: dk.Cluster) -> None:
    def total() -> None:
        dk.algorithms.ring_all_reduce(torch.ones(2))

    first = total.__code__.co_firstlineno + 1
    with usable.step(total) as stepper:
        stepper.next()
        now = stepper.moment.rank_states[0]
        assert now.event is not None
        label, _, line = now.event.attributes["caller"].rpartition(":")
        assert now.where.split(":")[0].endswith("ring.py") and int(line) == first
        assert label in stepper.trace.info.sources
        started = [e for e in stepper.trace.events if e.state is not State.SCHEDULED]
        assert started and not any("caller" in e.attributes for e in started)


def test_next_advances_every_rank_once(usable: dk.Cluster) -> None:
    stepper = usable.step(pass_on)
    assert status(stepper) == ["paused"] * 3
    assert calls(stepper) == ["send(dst=1)", "recv(src=0)", "recv(src=1)"]
    assert not [e for e in stepper.trace if e.state is not State.SCHEDULED]
    stepper.next()
    assert calls(stepper)[:2] == ["all_reduce()", "send(dst=2)"]
    assert stepper.moment.rank_states[2].reason == "rank 1 is paused before send(dst=2) at " + (
        stepper.moment.rank_states[1].where
    )
    stepper.next()
    assert stepper.moment.rank_states[0].status is RankStatus.BLOCKED
    assert stepper.next().finished
    assert stepper.finish().results == [6.0] * 3


def test_single_rank_blocks_until_its_partner_steps(usable: dk.Cluster) -> None:
    stepper = usable.step(pass_on)
    stepper.next(rank=1)
    assert status(stepper) == ["paused", "blocked", "paused"]
    assert stepper.moment.rank_states[1].waits_for == (0,)
    stepper.next(rank=0)
    assert status(stepper) == ["paused"] * 3
    assert calls(stepper)[:2] == ["all_reduce()", "send(dst=2)"]
    assert [m.choice for m in stepper.moments if m.choice] == [(1,), (0,)]
    stepper.finish()


def receive_out_of_order() -> list[float]:
    """Receive the second message first, by its tag."""
    me, x, y = dist.get_rank(), torch.ones(1), torch.full((1,), 2.0)
    if me == 0:
        works = [dist.isend(x, dst=1, tag=1), dist.isend(y, dst=1, tag=2)]
        for work in works:
            work.wait()  # type: ignore[union-attr]
    elif me == 1:
        dist.recv(x, src=0, tag=2)
        dist.recv(y, src=0, tag=1)
    return [x.item(), y.item()]


def test_isend_does_not_block_and_tags_select_messages(usable: dk.Cluster) -> None:
    stepper = usable.step(receive_out_of_order)
    stepper.next(rank=0).next(rank=0)  # both sends are in flight, and rank 0 waits for the first
    assert status(stepper) == ["blocked", "paused", "finished"]
    stepper.next(rank=1)
    assert calls(stepper)[:2] == ["send(dst=1, tag=1)", "recv(src=0, tag=1)"]
    assert stepper.finish().results[1] == [2.0, 1.0]


def receive_from_any() -> list[int]:
    """Receive from any source on rank 0; return the sources."""
    me, seen = dist.get_rank(), torch.zeros(1)
    if me == 0:
        return [dist.recv(seen) or 0 for _ in range(2)]  # type: ignore[func-returns-value]
    dist.send(seen, dst=0)
    return []


def test_order_of_steps_determines_the_interleaving(usable: dk.Cluster) -> None:
    for first, second in ((1, 2), (2, 1)):
        stepper = usable.step(receive_from_any)
        for rank in (first, 0, second, 0):
            stepper.next(rank)
        assert stepper.finish().results[0] == [first, second]


def test_past_moments_show_past_values(usable: dk.Cluster) -> None:
    stepper = usable.step(pass_on)
    while not stepper.finished:
        stepper.next()
    last = len(stepper.moments) - 1
    stepper.back(last)
    summaries = {e.rank: e.summary for e in events_so_far(stepper) if e.summary is not None}
    assert summaries[0] is not None and summaries[0].values == (1.0, 1.0, 1.0)
    assert stepper.next().position == 1  # from one past moment to the next: no rank continues
    assert stepper.seek(-1).position == last
    reduced = [
        e for e in events_so_far(stepper) if e.op is Op.ALL_REDUCE and e.state is State.COMPLETED
    ]
    assert {e.summary.values for e in reduced if e.summary} == {(6.0, 6.0, 6.0)}
    with pytest.raises(dk.errors.StepError, match="the moments are 0 to"):
        stepper.seek(99)


def test_pauses_are_excluded_from_times(usable: dk.Cluster) -> None:
    stepper = usable.step(pass_on)
    time.sleep(2)
    while not stepper.finished:
        stepper.next()
    assert stepper.trace.seconds < 2
    times = [e.time for e in stepper.trace]
    assert times == sorted(times)
    assert all(a.time <= b.time for a, b in zip(stepper.moments, stepper.moments[1:], strict=False))


def test_pause_stops_playing(usable: dk.Cluster) -> None:
    def endless() -> None:
        while True:
            dist.barrier()

    stepper = usable.step(endless)
    player = threading.Thread(target=stepper.play, args=(100,))
    player.start()
    while len(stepper.moments) < 5:
        time.sleep(0.01)
    assert stepper.playing
    stepper.pause()
    player.join(5)
    assert status(stepper) == ["paused"] * 3
    stepper.stop()


def test_play_replays_earlier_moments_and_then_continues(usable: dk.Cluster) -> None:
    stepper = usable.step(pass_on)
    stepper.next().next().back(2).play(speed=1000)
    assert stepper.finished and stepper.moment is stepper.moments[-1]
    assert stepper.run.results == [6.0] * 3


def test_ddp_can_be_stepped(usable: dk.Cluster) -> None:
    stepper = usable.step(SCRIPTS / "ddp_basic.py")
    while not stepper.finished:
        stepper.next()
    calls = [s.event for m in stepper.moments for s in m.rank_states if s.event is not None]
    assert Op.ALL_REDUCE in {e.op for e in calls}
    assert any("gradients" in e.attributes for e in calls)


def functional() -> float:
    x = torch.ones(3) * (dist.get_rank() + 1)
    total = all_reduce(x, "sum", dist.group.WORLD) + 0  # using the value waits for it
    with torch.inference_mode():
        y = torch.ones(3)
        dist.all_reduce(y)
        return float((all_reduce(y, "max", dist.group.WORLD) + total)[0])


def test_functional_collectives_are_steps_under_inference_mode(usable: dk.Cluster) -> None:
    with usable.step(functional).next(rank=0) as stepper:
        assert status(stepper) == ["blocked", "paused", "paused"]
        assert stepper.moment.rank_states[0].reason == "ranks 1 and 2 have not called it"
        seen = []
        while not stepper.finished:
            stepper.next()
            seen.append([call for call in calls(stepper) if call])
        assert seen == [["all_reduce()"] * 3, ["all_reduce(max)"] * 3, []]
        assert stepper.finish().results == [9.0] * 3


def wait_at_the_store() -> str:
    """Wait on ranks 1 and 2 for a key that rank 0 sets."""
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        store.set("ready", "go")
    elif dist.get_rank() == 1:
        return store.get("ready").decode()
    else:
        store.wait(["ready"])
    return ""


def test_store_calls_are_steps(usable: dk.Cluster) -> None:
    with usable.step(wait_at_the_store) as stepper:
        assert calls(stepper) == ["store.set('ready')", "store.get('ready')", "store.wait('ready')"]
        stepper.next(rank=1).next(rank=2)
        assert status(stepper) == ["paused", "blocked", "blocked"]
        assert stepper.moment.rank_states[1].reason == "no rank has set 'ready'"
        assert stepper.next(rank=0).finished
        assert stepper.finish().results == ["", "go", ""]


def raise_after_a_barrier() -> None:
    dist.barrier()
    if dist.get_rank() == 1:
        raise ValueError("after the barrier")
    dist.barrier()


def test_rank_exception_ends_the_stepper(usable: dk.Cluster) -> None:
    stepper = usable.step(raise_after_a_barrier)
    with pytest.raises(dk.errors.RankError, match="after the barrier"):
        stepper.next()
    assert "after the barrier" in stepper.error
    with pytest.raises(dk.errors.StepError, match="has ended with RankError"):
        stepper.next()


def receive_from_each_other() -> None:
    other = {0: 1, 1: 0}.get(dist.get_rank())
    if other is not None:
        dist.recv(torch.zeros(1), src=other)


def test_deadlock_is_explained(usable: dk.Cluster) -> None:
    stepper = usable.step(receive_from_each_other)
    stepper.next(rank=0)
    with pytest.raises(dk.errors.DeadlockError, match="each waits for the other") as caught:
        stepper.next(rank=1)
    assert [f.culprits for f in caught.value.findings] == [(0, 1)]
    assert stepper.findings == caught.value.findings


def test_wait_forever_keeps_a_deadlock(usable: dk.Cluster) -> None:
    stepper = usable.step(receive_from_each_other, wait_forever=True).next()
    assert status(stepper) == ["blocked", "blocked", "finished"]
    assert [str(f.kind) for f in stepper.findings] == ["recv_cycle"]
    with pytest.raises(dk.errors.StepError, match="no rank can continue: rank 0: blocked in recv"):
        stepper.next()
    stepper.stop()
    assert stepper.finished


def test_invalid_steps_raise(usable: dk.Cluster) -> None:
    stepper = usable.step(pass_on)
    for unknown in (7, -1, "one"):
        with pytest.raises(dk.errors.StepError, match="the ranks are 0 to 2"):
            stepper.next(rank=unknown)  # type: ignore[arg-type]
    stepper.next(rank=2)
    with pytest.raises(dk.errors.StepError, match=r"rank 2 is not paused.*Resume ranks 0 and 1"):
        stepper.next(rank=2)
    stepper.back()
    with pytest.raises(dk.errors.StepError, match="an earlier step is displayed"):
        stepper.next(rank=0)
    with pytest.raises(dk.errors.StepError, match="a positive number"):
        stepper.play(speed=0)
    stepper.stop()


def test_run_while_stepping_raises_and_a_new_stepper_replaces_the_old(usable: dk.Cluster) -> None:
    first = usable.step(pass_on)
    with pytest.raises(
        dk.errors.ClusterError, match=r"stepping through pass_on.*stepper.finish\(\)"
    ):
        usable.run(pass_on)
    second = usable.step(pass_on)
    assert "pass_on was stopped on all ranks" in first.error
    assert second.finish().results == [6.0] * 3


def test_stop_button_interrupts_a_step_while_ranks_compute(usable: dk.Cluster) -> None:
    def slow() -> None:
        dist.barrier()
        time.sleep(60)

    stepper = usable.step(slow)
    with pytest.raises(KeyboardInterrupt):
        threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGINT]).start()
        stepper.next()
    assert status(stepper) == ["paused"] * 3  # at the last moment, although the ranks are running
    assert not stepper.finished
    stepper.stop()


def test_rank_killed_while_paused_is_reported(usable: dk.Cluster) -> None:
    stepper = usable.step(pass_on)
    os.kill(usable.status().rows[1][2], signal.SIGKILL)
    with pytest.raises(dk.errors.RankDied, match="process of rank 1"):
        stepper.finish()


def test_output_of_a_step_is_printed(
    usable: dk.Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    def print_after_barriers() -> None:
        for number in range(20):
            dist.barrier()
            print("past barrier", number)

    with usable.step(print_after_barriers) as stepper:
        for number in range(19):
            stepper.next()
            assert sorted(capsys.readouterr().out.splitlines()) == [
                f"[rank {r}] past barrier {number}" for r in range(3)
            ]
        assert "step 19 of 19, latest" in repr(stepper) and "rank 2: paused before" in repr(stepper)
