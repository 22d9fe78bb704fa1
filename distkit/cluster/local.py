"""Ranks without ipyparallel: forked, run once, gone. For tests, scripts and checks."""

from __future__ import annotations

import platform
import selectors
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from distkit.cluster import limits
from distkit.cluster.forkserver import Child, private_folder, server
from distkit.cluster.pickling import pack
from distkit.cluster.plan import make_plan
from distkit.cluster.run import Run
from distkit.cluster.spec import Spec, surroundings


def run_ranks(
    fn: Callable[..., Any] | str | Path, n: int, *args: Any, record: bool = True, **kwargs: Any
) -> Run:
    """Run a function on ``n`` fresh ranks, forked from a warm process, and wait for it.

    The same ranks, recording and errors as :meth:`Cluster.run`, without ipyparallel: some
    tens of milliseconds once torch is imported in the fork server. CPU and gloo only.

    Args:
        fn: a function, or the path of a torchrun-style script.
        n: how many ranks.
        args: passed to ``fn``, the same on every rank.
        kwargs: likewise.
        record: whether to record a trace.

    Raises:
        RankError, RankDied, NotPicklableError, StartError: as :meth:`Cluster.run`.

    Example:
        >>> def total():
        ...     x = torch.ones(1)
        ...     dist.all_reduce(x)
        ...     return x.item()
        >>> run_ranks(total, 2).results              # doctest: +SKIP
        [2.0, 2.0]
    """
    payload = pack(fn, args, kwargs)
    plan = make_plan(n, 0, "cpu", "gloo", cpus=limits.cpus(), memory=limits.memory(), gpus=0)
    gang = _Gang(n, plan.threads)
    try:
        run = Run(getattr(fn, "__name__", str(fn)), 1, list(range(n)), gang.meta())
        gang.submit(run, payload, record)
        return run.wait()
    finally:
        gang.close()


class _Gang:
    """The forked ranks of one call, each with a line to this process."""

    def __init__(self, n: int, threads: int) -> None:
        self.folder = private_folder()
        self._listener: threading.Thread | None = None
        server().preload("distkit.cluster.warm")
        around = surroundings()
        self.ranks: list[Child] = server().fork_all("distkit.cluster.processes:plain", [
            {"spec": Spec(r, n, self.folder, threads=threads, **around),
             "folder": self.folder, "log": f"rank-{r}.log"}
            for r in range(n)
        ])  # fmt: skip

    def submit(self, run: Run, payload: bytes, record: bool) -> None:
        for child in self.ranks:
            child.channel.send((payload, {"run": 1, "generation": 0, "record": record}))
        self._listener = threading.Thread(target=self._listen, args=(run,), daemon=True)
        self._listener.start()
        threading.Thread(target=run.conduct, args=(self,), daemon=True).start()

    def _listen(self, run: Run) -> None:
        """Pass on what the ranks say until all have ended."""
        with selectors.DefaultSelector() as lines:
            for r, child in enumerate(self.ranks):
                lines.register(child.channel, selectors.EVENT_READ, r)
            while lines.get_map():
                for key, _ in lines.select():
                    try:
                        self._hear(run, key.data)
                    except EOFError:
                        lines.unregister(key.fileobj)
                        self.ranks[key.data].channel.close()
                        self._ended(run, key.data)

    def _hear(self, run: Run, rank: int) -> None:
        kind, what = self.ranks[rank].channel.recv()
        if kind == "rows":
            run.add_rows(rank, *what)
        elif kind == "text":
            run.add_text(rank, *what)
        else:
            run.add_outcome(rank, what)

    def _ended(self, run: Run, rank: int) -> None:
        log = Path(self.folder, f"rank-{rank}.log")
        text = log.read_text(errors="replace")[-20_000:] if log.exists() else ""
        self.ranks[rank].on_exit(lambda status: run.add_death(rank, status, text))

    def release(self, ranks: Iterable[int], run: int) -> None:
        """Crew: get these ranks out of whatever they wait in."""
        for r in ranks:
            try:
                self.ranks[r].channel.send(("release", run))
            except OSError:  # it has just ended
                continue

    def end(self, ranks: Iterable[int]) -> None:
        """Crew: end these ranks' processes."""
        server().kill([self.ranks[r] for r in ranks])

    def settle(self, run: int) -> None:
        """Crew: the ranks are all there is."""

    def meta(self) -> dict[str, Any]:
        ranks = {
            str(r): {"name": f"rank {r}", "role": "rank", "host": platform.node(),
                     "pid": child.pid, "device": "cpu"}
            for r, child in enumerate(self.ranks)
        }  # fmt: skip
        return {"world_size": len(self.ranks), "backend": "gloo", "ranks": ranks}

    def close(self) -> None:
        server().kill(self.ranks)
        if self._listener is not None:
            self._listener.join(5)
        server().remove(self.folder)
