"""Runs a function once on ranks without ipyparallel, for tests, scripts and checks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec import structs

from distkit.cluster import machine
from distkit.cluster.pickling import pack
from distkit.cluster.plan import make_plan
from distkit.cluster.processes.forkserver import end, server
from distkit.cluster.rank import seeds
from distkit.cluster.runs.conductor import Conductor
from distkit.cluster.runs.ranks import Ranks
from distkit.cluster.runs.run import Run
from distkit.recording import trouble


def run_ranks(
    fn: Callable[..., Any] | str | Path,
    n: int,
    *args: Any,
    record: bool = True,
    wait_forever: bool = False,
    seed: int | None = None,
    timeout: float | None = None,
    raw: bool = False,
    **kwargs: Any,
) -> Run:
    """Run a function on ``n`` new ranks, forked from a running process, and wait for it.

    Ranks, recording and errors are the same as in :meth:`Cluster.run`. A run takes some tens of
    milliseconds once the fork server has imported torch. It uses only the CPU and gloo.

    Args:
        fn: a function, or the path of a torchrun-style script.
        n: number of ranks.
        args: arguments of ``fn``, the same on every rank.
        kwargs: keyword arguments of ``fn``, the same on every rank.
        record: whether to record a trace; without a trace no deadlock is detected.
        wait_forever: do not release deadlocked ranks.
        seed: seed of the ranks' random numbers, as in :meth:`Cluster.run`.
        timeout: time limit after which the ranks are killed [s].
        raw: ``fn`` returns bytes, which ``results`` contains unchanged. This process unpickles
            nothing, so an untrusted function cannot execute code in it.

    Raises:
        DeadlockError, RankError, RankDied, NotPicklableError, StartError: as :meth:`Cluster.run`.
        RunInterrupted: the run did not end within ``timeout``.

    Example:
        >>> def total():
        ...     x = torch.ones(1)
        ...     dist.all_reduce(x)
        ...     return x.item()
        >>> run_ranks(total, 2).results              # doctest: +SKIP
        [2.0, 2.0]
    """
    seed, kwargs = seeds.for_call(fn, kwargs, seed)
    payload = pack(fn, args, kwargs)
    plan = make_plan(n, 0, "cpu", "gloo", cpus=machine.cpus(), memory=machine.memory())
    faults = trouble.current()
    if faults is not None:
        faults.check(n)
    folder = server().make_folder(n)
    ranks = Ranks(plan, folder)
    try:
        server().preload("distkit.cluster.processes.preload:hook")
        ranks.start(recording=record)
        conductor = Conductor(
            getattr(fn, "__name__", str(fn)),
            1,
            list(range(n)),
            structs.replace(ranks.info(), seed=seed),
            wait_forever=wait_forever,
            expected_exits=faults.kill if faults is not None else (),
            afterwards="",
        )
        ranks.submit(
            conductor, payload, {"record": record, "trouble": faults, "seed": seed, "raw": raw}
        )
        killer = threading.Timer(timeout or 0, _kill, [ranks, conductor, timeout])
        if timeout is not None:
            killer.start()  # a thread, because printing may block this one forever
        try:
            return Run(conductor, raw=raw).wait()
        finally:
            killer.cancel()
    finally:
        end(ranks.children.values())
        server().remove(folder)


def _kill(ranks: Ranks, conductor: Conductor, timeout: float) -> None:
    """Kill the ranks after the time limit."""
    conductor.abandon(f"it did not end within {timeout:g} s")
    ranks.end(conductor.ranks)
