"""Ranks without ipyparallel: forked, run once, gone. For tests, scripts and checks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from pickle import dumps
from typing import Any

from msgspec import structs

from distkit.cluster import limits
from distkit.cluster.pickling import pack
from distkit.cluster.plan import Plan, make_plan
from distkit.cluster.processes.rank_spec import Spec, free_port, surroundings
from distkit.cluster.rank import seeds
from distkit.cluster.runs.conductor import Conductor, RankController
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
    plan = make_plan(n, 0, "cpu", "gloo", cpus=limits.cpus(), memory=limits.memory())
    made = trouble.current()
    if made is not None:
        made.check(n)
    gang = _Gang(plan)
    try:
        conductor = Conductor(
            getattr(fn, "__name__", str(fn)),
            1,
            list(range(n)),
            structs.replace(gang.info(), seed=seed),
            wait_forever=wait_forever,
            expected_exits=made.kill if made is not None else (),
            afterwards="",
        )
        gang.submit(
            conductor, payload, {"record": record, "trouble": made, "seed": seed, "raw": raw}
        )
        with _ended(within, gang, conductor):
            return Run(conductor, raw=raw).wait()
    finally:
        gang.close()


@contextmanager
def _ended(within: float | None, gang: _Gang, conductor: Conductor) -> Iterator[None]:
    """Kill the ranks when the time is over; a thread does, as those who print may never stop."""

    def kill() -> None:
        conductor.abandon(f"it did not end within {within:g} s")
        gang.end(gang.ranks)

    timer = threading.Timer(within or 0, kill)
    if within is not None:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


class _Gang(RankController):
    """The forked ranks of one call, each with a line to this process."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self._fork.preload("distkit.cluster.processes.preload:hook")
        around = {**surroundings(), "port": free_port()}
        children = self._fork.fork_all(
            "distkit.cluster.processes.roles:plain",
            [
                {
                    "spec": Spec(r, plan.ranks, self.folder, threads=plan.threads, **around),
                    "folder": self.folder,
                    "log": f"rank-{r}.log",
                }
                for r in range(plan.ranks)
            ],
        )
        self.ranks = dict(enumerate(children))

    def submit(self, run: Conductor, payload: bytes, options: dict[str, Any]) -> None:
        """Hand the call to every rank; what comes back goes to ``run`` from another thread."""
        for r, child in self.ranks.items():
            child.hear(partial(self._hear, run, r))
            child.on_exit(partial(run.add_death, r, folder=self.folder))
            child.on_stop = partial(run.hear, r, "stopped")
            child.channel.send(dumps((payload, {**options, "run": run.number, "generation": 0})))
        threading.Thread(target=run.conduct, args=(self,), daemon=True).start()

    def _hear(self, run: Conductor, rank: int, message: tuple[int, str, Any]) -> None:
        _, kind, what = message
        run.hear(rank, kind, what)

    def close(self) -> None:
        self.end(self.ranks)
        self._fork.remove(self.folder)
