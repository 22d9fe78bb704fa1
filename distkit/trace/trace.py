"""The trace of a run as learners have it: an event log that explains, saves and draws itself.

It stands above diagnosis and views, which take an :class:`~distkit.trace.log.EventLog`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from distkit import companions
from distkit.gone import GONE
from distkit.trace.log import EventLog

if TYPE_CHECKING:
    from distkit.diagnosis.findings import Finding


class Trace(EventLog):
    """The communication of the ranks of one run: an immutable sequence of events.

    Args:
        events: in any order; they are kept sorted by time.
        info: what is known of the run besides, a :class:`~distkit.trace.info.RunInfo`: its name,
            ranks, groups, ends, sources, and what the record cannot tell.

    >>> from distkit.events import Event, Op, State
    >>> t = Trace([Event(0, 0, Op.SEND, State.STARTED, 0.0, peer=1, nbytes=4),
    ...            Event(1, 0, Op.RECV, State.COMPLETED, 0.1, peer=0, nbytes=4)])
    >>> [(m.src, m.dst, m.nbytes) for m in t.messages]
    [(0, 1, 4)]
    """

    @property
    def meta(self) -> NoReturn:
        """Removed: see :attr:`info`."""
        raise AttributeError(GONE["Trace.meta"])

    def diagnose(self) -> list[Finding]:
        """The mistakes and their remedies: the most important first."""
        from distkit.diagnosis.diagnose import diagnose

        return diagnose(self)

    # -- files --------------------------------------------------------------

    def save(self, path: str | Path) -> Path:
        """Write the trace as gzipped JSON lines: no pickle, so opening one runs nothing."""
        from distkit.trace import file

        return file.save(self, Path(path))

    @classmethod
    def load(cls, path: str | Path | Sequence[str | Path]) -> Trace:
        """Read a saved trace, or what another program has recorded. Needs no torch.

        PyTorch's flight-recorder dumps (JSON or pickle, of which only plain values are read)
        and the Chrome traces of ``torch.profiler`` have a file per rank: give a list of them, or
        their folder. The rank is what a file says, or a number in its name; ``info.ranks`` has
        the file of each. Logs of NCCL (``NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,COLL``) are one
        file of all ranks, or one per rank. Recorded steps of pipelines, as ByteDance's what-if
        analysis publishes them, are one file. What a file is, its content decides, not its name.
        What such files cannot tell, :meth:`diagnose` says.

        A folder in which :func:`distkit_hosts.record` has recorded a run's ranks becomes one trace,
        also while they run; of several runs it is the latest.

        Args:
            path: a file, several of one run, or a folder of them.

        Raises:
            TraceFileError: not a trace, corrupt, truncated, or of a newer version.
            FileNotFoundError: there is no such file.
            IsADirectoryError: the folder is empty.

        Example:
            >>> Trace.load("/tmp/dumps").diagnose()        # doctest: +SKIP
        """
        from distkit.trace import file

        if isinstance(path, (str, Path)) and not Path(path).is_dir() and file.is_ours(Path(path)):
            return file.load(Path(path), cls)
        paths = [path] if isinstance(path, (str, Path)) else path
        foreign = companions.load("distkit_hosts.foreign")
        trace: Trace = foreign.load([Path(one) for one in paths], cls)
        return trace

    def to_chrome(self, path: str | Path) -> Path:
        """Write Chrome trace JSON: open it in https://ui.perfetto.dev or chrome://tracing."""
        from distkit.trace import chrome

        return chrome.to_chrome(self, path)

    def to_html(self, path: str | Path) -> Path:
        """Write a stand-alone replay page: one file, no server, nothing loaded from elsewhere."""
        from distkit.views.widget.page import to_html

        return to_html(self, path)

    def _ipython_display_(self) -> None:
        from distkit.views import Timeline

        Timeline(self)._ipython_display_()
