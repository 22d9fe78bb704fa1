"""Waits for a store, for requests and for other threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

import distkit as dk
from distkit.cluster import Run
from distkit.diagnosis.rules import Finding
from distkit.events import Op, State


def store() -> Any:
    return dist.distributed_c10d._get_default_store()


def calls(run: Run, rank: int) -> list[tuple[Op, str]]:
    mine = sorted((s for s in run.trace.spans if s.rank == rank), key=lambda s: s.seq)
    assert {s.state for s in mine} == {State.COMPLETED}
    return [(s.op, s.label) for s in mine]


def finding_of(program: Callable[[], Any], ranks: int = 2) -> Finding:
    with pytest.raises(dk.errors.DeadlockError) as caught:
        dk.run_ranks(program, ranks)
    (finding,) = caught.value.findings
    assert finding.hang
    return finding


# -- requests -------------------------------------------------------------------------


def never_received() -> None:
    if dist.get_rank() == 0:
        work = dist.isend(torch.ones(1), dst=1)
        x = torch.zeros(1)
        work.wait()  # type: ignore[union-attr]
        x.add_(1)
    else:
        dist.recv(torch.zeros(1), src=0, tag=5)


def test_blocked_request_names_the_waiting_line() -> None:
    with pytest.raises(dk.errors.DeadlockError) as caught:
        dk.run_ranks(never_received, 2)
    blocked = {e.rank: e for e in caught.value.run.trace.events if e.state is State.BLOCKED}
    file, line = blocked[0].where.rsplit(":", 1)
    assert blocked[0].attributes["waits_at"] == f"{file}:{int(line) + 2}"
    assert "waits_at" not in blocked[1].attributes  # one call, one line
    assert blocked[1].attributes["stack"][0] == blocked[1].where


# -- stores ---------------------------------------------------------------------------


def shared_keys() -> list[Any]:
    keys = store()
    if dist.get_rank() == 0:
        keys.set("word", "yes")
        keys.add("count", 2)
    else:
        keys.wait(["word", "count"])
    return [keys.get("word"), keys.multi_get(["word"]), keys.check(["unset"])]


def test_store_is_recorded_and_unchanged() -> None:
    run = dk.run_ranks(shared_keys, 2)
    assert run.results == dk.run_ranks(shared_keys, 2, record=False).results
    last = [(Op.STORE_WAIT, "get word"), (Op.STORE_WAIT, "multi_get word")]
    assert calls(run, 0) == [(Op.STORE_SET, "set word"), (Op.STORE_SET, "add count"), *last]
    assert calls(run, 1) == [(Op.STORE_WAIT, "wait word, count"), *last]


def missing_key() -> None:
    store().get("unset")


def misspelled_key() -> None:
    if dist.get_rank() == 0:
        store().set("data/ready", "yes")
    else:
        store().wait(["data_ready"])


def key_behind_a_barrier() -> None:
    if dist.get_rank() == 0:
        store().wait(["go"])
        dist.barrier()
    else:
        dist.barrier()
        store().set("go", "now")


def key_awaited_before_a_barrier() -> None:
    if dist.get_rank() == 0:
        store().get("weights")
    dist.barrier()


@pytest.mark.parametrize(
    ("program", "culprits", "text"),
    [
        (missing_key, (0, 1), "ranks 0 and 1 wait in store.get('unset')"),
        (misspelled_key, (0,), "rank 0 has called store.set('data/ready')"),
        (key_behind_a_barrier, (1,), "no rank has set 'go'; rank 1 waits in barrier()"),
        (
            key_awaited_before_a_barrier,
            (1,),
            "no rank has set 'weights'; rank 1 waits in barrier()",
        ),
    ],
)
def test_unset_key_is_named(
    program: Callable[[], None], culprits: tuple[int, ...], text: str
) -> None:
    finding = finding_of(program)
    assert finding.kind == "missing_key"
    assert finding.culprits == culprits
    assert text in finding.message


# -- threads ----------------------------------------------------------------------------


def in_threads(*calls: Callable[[], Any]) -> None:
    """Run each call in a new thread, after the previous call has started."""
    threads = []
    for call in calls:
        started = threading.Event()

        def work(call: Callable[[], Any] = call, started: threading.Event = started) -> None:
            started.set()
            call()

        threads.append(threading.Thread(target=work))
        threads[-1].start()
        started.wait()
        threads[-1].join(0.5)  # gives the thread time to enter its call
    for thread in threads:
        thread.join()


def one_group_for_two_threads() -> None:
    weights, biases = torch.ones(3), torch.ones(5)
    calls = (lambda: dist.all_reduce(weights), lambda: dist.broadcast(biases, 0))
    in_threads(*(calls if dist.get_rank() == 0 else calls[::-1]))


def test_threads_with_different_orders_on_one_group_are_diagnosed() -> None:
    finding = finding_of(one_group_for_two_threads)
    assert finding.culprits == (0, 1)
    assert "a separate group for each thread" in finding.remedy


def a_thread_of_a_pool() -> None:
    with ThreadPoolExecutor(1) as pool:
        if dist.get_rank() == 0:
            pool.submit(lambda: dist.all_reduce(torch.ones(2))).result()


def test_main_thread_waiting_for_a_blocked_thread_is_diagnosed() -> None:
    finding = finding_of(a_thread_of_a_pool)
    assert (finding.kind, finding.culprits) == ("skipped", (1,))
