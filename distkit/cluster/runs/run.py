"""The user's interface to a run of a function on the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from pickle import loads
from typing import TYPE_CHECKING, Any

from distkit._format import short_call
from distkit.cluster import machine
from distkit.cluster.notebook import LOST_VARIABLES, in_notebook, warn
from distkit.cluster.pickling import pack
from distkit.cluster.plan import make_plan
from distkit.cluster.processes.fork_client import kill_processes, server
from distkit.cluster.processes.rank_spec import call_seed
from distkit.cluster.runs.conductor import MAX_DIAGNOSED_EVENTS, Conductor
from distkit.cluster.runs.outcome import Outcome, text
from distkit.cluster.runs.ranks import Ranks
from distkit.errors import NotPicklableError, RunError, RunStopped
from distkit.events import Event
from distkit.recording import faults

if TYPE_CHECKING:
    from distkit.diagnosis.rules import Finding
    from distkit.trace.trace import Trace
    from distkit.views.timeline.view import Timeline

#: A notebook shows the timeline of a run that takes longer than this [s]. It is folded when the run
#: ends; only the latest MAX_FOLDED folded timelines are interactive, to limit memory.
TIMELINE_DELAY, MAX_FOLDED = 1.0, 8
_folded: list[Timeline] = []


class Run:
    """A running or finished run of a function on the ranks.

    ``results`` (one per rank), ``trace`` and ``seconds`` describe a finished run. During a run,
    ``trace`` contains the events so far, ``wait()`` waits until the run has finished, and
    ``interrupt()`` interrupts it. In a notebook, a run is displayed as a timeline of its messages.
    """

    def __init__(self, conductor: Conductor, *, raw: bool = False) -> None:
        self._conductor, self._raw = conductor, raw
        self.name, self.number, self.ranks = conductor.name, conductor.number, conductor.ranks
        self._timeline: Timeline | None = None  # shown while the run is in progress
        self._warned = False

    def __repr__(self) -> str:
        if not self.finished:
            state = f"running on {len(self.ranks)} ranks"
        elif error := self._conductor.error:
            state = f"failed: {str(error).splitlines()[0]}"
        else:
            state = (
                f"{len(self.ranks)} ranks, {self.seconds:.3g} s, "
                f"{self._conductor.live.event_count} events"
            )
        return f"<Run {self.number} of {self.name}: {state}>"

    def _ipython_display_(self) -> None:
        """Show the timeline; a timeline that :func:`follow` has shown is removed."""
        from IPython.display import display

        from distkit.views.timeline.view import Timeline

        if self._timeline is not None:
            self._timeline.remove()
            self._timeline = None
        if self.finished and not self._conductor.live.event_count:
            display({"text/plain": repr(self)}, raw=True)
        else:
            display(Timeline(self if not self.finished else self.trace))

    @property
    def finished(self) -> bool:
        """True if the run is over, whether or not it succeeded."""
        return self._conductor.finished

    @property
    def seconds(self) -> float:
        """The duration of the run [s], or 0 until it is over."""
        return self._conductor.seconds

    @property
    def results(self) -> list[Any]:
        """The function's results, by rank. Waits for the run, and raises like :meth:`wait`.

        Raises:
            NotPicklableError: a result cannot be unpickled.
        """
        self.wait()
        return self._results

    @cached_property
    def _results(self) -> list[Any]:
        """The results. They are unpickled on first use because unpickling may execute user code."""
        return [self._read(self._conductor.outcomes[r]) for r in self.ranks]

    def _read(self, outcome: Outcome) -> Any:
        if outcome.result is None or self._raw:
            return outcome.result
        try:
            return loads(outcome.result)
        except KeyboardInterrupt:
            raise
        except BaseException as cause:
            raise NotPicklableError(
                f"rank {outcome.rank} returned an object of type {outcome.result_type} that cannot "
                f"be unpickled here ({type(cause).__name__}: {text(cause)}). "
                "Return plain data: numbers, strings, lists, dicts, tensors."
            ) from cause

    @property
    def output(self) -> list[str]:
        """The output of each rank so far; a notebook may show only part of it."""
        return [self._conductor.output.output_of(rank) for rank in self.ranks]

    @property
    def error(self) -> RunError | None:
        """The error of the run, or None if there is none."""
        error = self._conductor.error
        if error is not None:
            error.run = self
        return error

    @property
    def trace(self) -> Trace:
        """The trace of the events received so far."""
        return self._conductor.trace

    @property
    def findings(self) -> list[Finding]:
        """The deadlock that ended the run, or the findings about the events so far.

        See :meth:`distkit.Trace.diagnose`.
        """
        return self._conductor.findings

    def wait(self, timeout: float | None = None) -> Run:
        """Wait until all ranks have ended; print their output with labels.

        Raises:
            RankError: the function raised on a rank, or a rank died.
            DeadlockError: ranks would wait forever; the message explains where and why.
            RunInterrupted: the run was interrupted, for example by ``cluster.interrupt()``.
            KeyboardInterrupt: the wait was interrupted, and all ranks have ended.
            TimeoutError: ``timeout`` seconds have passed; the run continues.
        """
        conductor = self._conductor
        try:
            with interruptible(self):
                if not conductor.output.print_until(lambda: self.finished, timeout):
                    raise TimeoutError(
                        f"{self.name} is still running after {timeout} s, and continues"
                    )
        finally:
            with conductor.finish_lock:  # wait for the views' last update
                pass
        self._warn_once()
        if self.error is not None:
            raise self.error
        return self

    def interrupt(self) -> None:
        """Interrupt the function on every rank; the cluster stays usable."""
        self._conductor.interrupt()

    def subscribe(self, callback: Callable[[Sequence[Event]], None]) -> Callable[[], None]:
        """Call ``callback`` with all events so far, each new batch, and finally an empty list."""
        return self._conductor.live.subscribe(callback)

    def _warn_once(self) -> None:
        """Warn about lost variables of cells, and about mistakes in a run without an error."""
        if self._warned:
            return
        self._warned = True
        conductor = self._conductor
        if conductor.is_cell and not (conductor.intact or conductor.abandoned):
            warn([LOST_VARIABLES])
        if self.error is not None:
            return
        warn([missed for outcome in conductor.outcomes.values() for missed in outcome.missed])
        if conductor.live.event_count or conductor.live.info.unreduced:
            from distkit.cluster.runs import report  # lazy: it imports the diagnosis

            warn(report.replacement_texts(self.name, conductor.replacements))
            if conductor.live.event_count <= MAX_DIAGNOSED_EVENTS or conductor.died:
                warn(report.notable(self.findings, in_cell=conductor.is_cell))


@contextmanager
def interruptible(run: Run) -> Iterator[None]:
    """End the run on every rank if the user interrupts the block."""
    try:
        yield
    except RunStopped:  # raised by a nested block
        raise
    except KeyboardInterrupt:
        run.interrupt()
        run._conductor.output.print_until(lambda: run.finished, None)
        error = RunStopped(str(run._conductor.error or f"{run.name} has ended on all ranks."))
        error.run = run
        raise error from None


def follow(run: Run, args: Sequence[object] = (), kwargs: Mapping[str, object] = {}) -> Run:
    """Wait for a run. In a notebook, show the timeline of a long run, and fold it at the end.

    ``args`` and ``kwargs``, the function's arguments, identify the run in the folded line.
    """
    with interruptible(run):  # also while the timeline is drawn, which can be slow
        if not in_notebook():
            return run.wait()
        while True:
            with suppress(TimeoutError):  # the run may have finished
                return run.wait(TIMELINE_DELAY)
            if run._conductor.live.event_count:  # otherwise there is no timeline to show
                break
        from IPython.display import display

        from distkit.views.timeline.view import Timeline

        run._timeline = Timeline(run)
        display(run._timeline)
        try:
            return run.wait()
        finally:
            run._timeline.fold(short_call(run.name, args, kwargs))
            _folded.append(run._timeline)
            if len(_folded) > MAX_FOLDED:
                _folded.pop(0).close()  # its picture remains


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
    """Run a function on ``n`` new ranks and wait until it has finished.

    Ranks, recording and errors are the same as in :meth:`Cluster.run`. Ranks are forked from a
    running process, so a run takes tens of milliseconds once that process has imported torch. Ranks
    use only the CPU and gloo.

    Args:
        fn: a function, or the path of a torchrun-style script.
        n: number of ranks.
        args: arguments of ``fn``, the same on every rank.
        kwargs: keyword arguments of ``fn``, the same on every rank.
        record: whether to record a trace; deadlocks are not detected without one.
        wait_forever: whether the run continues when its ranks are deadlocked.
        seed: seed for the ranks' random numbers, as in :meth:`Cluster.run`.
        timeout: time limit after which the run is stopped [s].
        raw: whether ``fn`` returns bytes, which are stored unchanged in ``results``. Nothing is
            unpickled, so an untrusted function cannot execute code in this process.

    Raises:
        DeadlockError, RankError, RankDied, NotPicklableError, StartError: see :meth:`Cluster.run`.
        RunInterrupted: the run did not end within ``timeout``.

    Example:
        >>> def total():
        ...     x = torch.ones(1)
        ...     dist.all_reduce(x)
        ...     return x.item()
        >>> run_ranks(total, 2).results              # doctest: +SKIP
        [2.0, 2.0]
    """
    seed, kwargs = call_seed(fn, kwargs, seed)
    payload = pack(fn, args, kwargs)
    plan = make_plan(n, 0, "cpu", "gloo", cpus=machine.cpus(), memory=machine.memory())
    injected_faults = faults.current()
    injected_faults.check(n)
    folder = server().make_folder(n)
    ranks = Ranks(plan, folder)
    try:
        server().preload("distkit.cluster.processes.roles:preload")
        server().prepare(fn, payload)
        conductor = Conductor(
            getattr(fn, "__name__", str(fn)),
            1,
            list(range(n)),
            ranks.info(),
            wait_forever=wait_forever,
            expected_exits=injected_faults.kill,
            conclusion="",
        )
        ranks.submit(
            conductor,
            payload,
            {"record": record, "faults": injected_faults, "seed": seed, "raw": raw},
        )
        run = Run(conductor, raw=raw)
        try:
            return run.wait(timeout)
        except TimeoutError:
            conductor.abandon(f"it did not end within {timeout:g} s")
            return run.wait()
    finally:
        kill_processes(ranks.children.values())
        server().remove(folder)


def poll(run: Run, timeout: float) -> list[tuple[int, str, str]]:
    """Wait for a run for up to ``timeout`` seconds; the caller must print the output and warnings.

    Returns:
        The new lines of output: rank, "stdout" or "stderr", text.
    """
    run._warned = True
    run._conductor.finished_event.wait(timeout)
    return run._conductor.output.pop_lines()
