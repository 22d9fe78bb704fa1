"""The trace of a run as learners have it: an event log that explains, saves and draws itself.

It stands above diagnosis and views, which take an :class:`~distkit.trace.log.EventLog`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from distkit.trace.log import EventLog

if TYPE_CHECKING:
    from distkit.diagnosis.findings import Finding


class Trace(EventLog):
    """The communication of the ranks of one run: an immutable sequence of events.

    Args:
        events: in any order; they are kept sorted by time.
        meta: about the run: ``name``, ``world_size``, ``backend``, ``ranks``
            (``{rank: {"name", "role", "host", "pid", "device"}}``), ``groups``
            (``{group: [ranks]}``), ``dropped`` (``{rank: events lost to the bound}``),
            ``without_values`` (``{rank: operations whose values cost too much to look at}``),
            ``threads`` (``{rank: [groups whose collectives several of its threads call]}``),
            ``unseen`` (``{rank: {what: count}}``: what was not recorded, or is not judged),
            ``ends`` (``{rank: {"how", "text", "where"}}`` of the ranks that have ended: "returned",
            "raised", "died", or "released" by others' failure or an interrupt; who died may
            have a ``"time"``),
            ``sources`` (``{file: text}``), ``interrupted`` (True if somebody ended it).

    >>> from distkit.events import Event, Op, State
    >>> t = Trace([Event(0, 0, Op.SEND, State.STARTED, 0.0, peer=1, nbytes=4),
    ...            Event(1, 0, Op.RECV, State.COMPLETED, 0.1, peer=0, nbytes=4)])
    >>> [(m.src, m.dst, m.nbytes) for m in t.messages]
    [(0, 1, 4)]
    """

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
    def load(cls, path: str | Path) -> Trace:
        """Read a saved trace. Needs no torch.

        Raises:
            TraceFileError: not a trace, corrupt, truncated, or of a newer version.
            FileNotFoundError: there is no such file.
        """
        from distkit.trace import file

        return file.load(Path(path), cls)

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
