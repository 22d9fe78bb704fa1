"""The user's trace of a run: an event log with methods to diagnose, save and display it.

This module imports diagnosis and views, which depend only on
:class:`~distkit.trace.log.EventLog`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from distkit import imports
from distkit.events import Op
from distkit.trace.log import EventLog

if TYPE_CHECKING:
    from distkit.diagnosis.rules import Finding


class Trace(EventLog):
    """The communication between the ranks of a run: an immutable sequence of events.

    Args:
        events: the events, in any order; the trace sorts them by time.
        info: metadata of the run: its name, ranks, groups, ends, sources, and the limits of the
            recording.

    >>> from distkit.events import Event, Op, State
    >>> t = Trace([Event(0, 0, Op.SEND, State.STARTED, 0.0, peer=1, nbytes=4),
    ...            Event(1, 0, Op.RECV, State.COMPLETED, 0.1, peer=0, nbytes=4)])
    >>> [(m.src, m.dst, m.nbytes) for m in t.messages]
    [(0, 1, 4)]
    """

    def diagnose(self) -> list[Finding]:
        """Return the mistakes found and their remedies, most important first."""
        from distkit.diagnosis.diagnose import diagnose

        return diagnose(self)

    # -- files --------------------------------------------------------------

    def save(self, path: str | Path) -> Path:
        """Write the trace as gzipped JSON lines; loading it executes no code."""
        from distkit.trace import file

        return file.save(self, Path(path))

    @classmethod
    def load(cls, path: str | Path | Sequence[str | Path]) -> Trace:
        """Read a saved trace, or files recorded by another program. Does not import torch.

        PyTorch's flight-recorder dumps (JSON or pickle; only plain values are read) and the
        Chrome traces from ``torch.profiler`` have one file per rank: pass a list of files or their
        folder. The rank is read from the file's content, or else from a number in its name;
        ``info.ranks`` contains the file of each rank. The format is detected from the content, not
        from the name. :meth:`diagnose` reports the limits of such files.

        A folder written by :func:`distkit_hosts.record` is merged into one trace, even while the
        ranks are running; if it contains several runs, the latest is read.

        Args:
            path: a file, several files of one run, or a folder.

        Raises:
            TraceFileError: a file is not a trace, is corrupt or truncated, or has a different
                version.
            FileNotFoundError: a file does not exist.
            IsADirectoryError: a folder contains no files.

        Example:
            >>> Trace.load("/tmp/dumps").diagnose()        # doctest: +SKIP
        """
        from distkit.trace import file

        paths = [*map(Path, [path] if isinstance(path, (str, Path)) else path)]
        if len(paths) == 1 and not paths[0].is_dir() and file.is_trace_file(paths[0]):
            return file.load(paths[0], cls)
        trace: Trace = imports.load("distkit_hosts.importers").load(paths, cls)
        return trace

    def to_chrome(self, path: str | Path) -> Path:
        """Write Chrome trace JSON, for https://ui.perfetto.dev or chrome://tracing."""
        from distkit.trace import chrome

        return chrome.to_chrome(self, path)

    def to_html(self, path: str | Path) -> Path:
        """Write a self-contained replay page: one file that needs no server and no network."""
        from distkit.views.widget.page import to_html

        return to_html(self, path)

    def _ipython_display_(self) -> None:
        from distkit.views.timeline.view import Timeline

        Timeline(self)._ipython_display_()


def without_idle_servers(trace: Trace) -> Trace:
    """Return a trace without the events of servers and the scheduler if no worker uses a KVStore.

    >>> from distkit.events import Event, State
    >>> from distkit.trace.info import RankInfo, RunInfo
    >>> info = RunInfo(ranks={0: RankInfo(role="worker"), 1: RankInfo(role="server")})
    >>> waits = Event(1, 0, Op.REGISTER, State.STARTED, 0.0, peer=2)
    >>> len(without_idle_servers(Trace([waits], info)))
    0
    >>> create = Event(0, 0, Op.REGISTER, State.STARTED, 0.1, peer=2)
    >>> len(without_idle_servers(Trace([waits, create], info)))
    2
    """
    idle = {r for r, process in trace.info.ranks.items() if process.role in ("server", "scheduler")}
    has_store = not idle or any(e.op is Op.REGISTER and e.rank not in idle for e in trace.events)
    return trace if has_store else Trace((e for e in trace if e.rank not in idle), trace.info)
