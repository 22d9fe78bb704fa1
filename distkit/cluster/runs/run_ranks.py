"""Ranks without ipyparallel: forked, run once, gone. For tests, scripts and checks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
    within: float | None = None,
    raw: bool = False,
    **kwargs: Any,
) -> Run:
    """Run a function on ``n`` new ranks, forked from a running process, and wait for it.

    The same ranks, recording and errors as :meth:`Cluster.run`, without ipyparallel: some
    tens of milliseconds once torch is imported in the fork server. CPU and gloo only.

    Args:
        fn: a function, or the path of a torchrun-style script.
        n: number of ranks.
        args: passed to ``fn``, the same on every rank.
        kwargs: likewise.
        record: whether to record a trace; without one no deadlock is detected.
        wait_forever: do not release ranks that wait for each other forever.
        seed: of the ranks' random numbers, as of :meth:`Cluster.run`.
        within: kill the ranks after so many seconds, whatever they do.
        raw: ``fn`` returns bytes, which ``results`` has as they are. Then nothing that the ranks
            send is unpickled, and a function that is not trusted runs nothing here.

    Raises:
        DeadlockError, RankError, RankDied, NotPicklableError, StartError: as :meth:`Cluster.run`.
        RunInterrupted: the time ``within`` which it had to end is over.

    Example:
        >>> def total():
        ...     x = torch.ones(1)
        ...     dist.all_reduce(x)
        ...     return x.item()
        >>> run_ranks(total, 2).results              # doctest: +SKIP
        [2.0, 2.0]
    """
    seed, kwargs = seeds.of_call(fn, kwargs, seed)
    payload = pack(fn, args, kwargs)
    plan = make_plan(n, 0, "cpu", "gloo", cpus=machine.cpus(), memory=machine.memory())
    made = trouble.current()
    if made is not None:
        made.check(n)
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
            expected_exits=made.kill if made is not None else (),
            afterwards="",
        )
        ranks.submit(
            conductor, payload, {"record": record, "trouble": made, "seed": seed, "raw": raw}
        )
        with _ended(within, ranks, conductor):
            return Run(conductor, raw=raw).wait()
    finally:
        end(ranks.children.values())
        server().remove(folder)


@contextmanager
def _ended(within: float | None, ranks: Ranks, conductor: Conductor) -> Iterator[None]:
    """Kill the ranks when the time is over; a thread does, as those who print may never stop."""

    def kill() -> None:
        conductor.abandon(f"it did not end within {within:g} s")
        ranks.end(ranks.ranks)

    timer = threading.Timer(within or 0, kill)
    if within is not None:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
