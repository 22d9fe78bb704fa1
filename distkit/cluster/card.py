"""The status card: what the cluster is and how far it has come, live in a notebook."""

from __future__ import annotations

import html
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from distkit._format import aligned, count

if TYPE_CHECKING:
    from distkit.cluster.processes.forkserver import Child
    from distkit.cluster.supervisor import Supervisor
    from distkit.views.widget.snapshot import HtmlSnapshot

_COLUMNS = ("node", "host", "pid", "device", "state")


@dataclass(frozen=True)
class Status:
    """A cluster at one moment: ``rows`` of (node, host, pid, device, state)."""

    what: str
    stage: str
    note: str
    rows: list[tuple[str, str, int | str, str, str]]

    @property
    def title(self) -> str:
        """The cluster in one line."""
        return f"{self.what} · {self.stage}"

    def __repr__(self) -> str:
        table = [_COLUMNS, *(tuple(map(str, row)) for row in self.rows)]
        return "\n".join([f"{self.title} · {self.note}", *aligned(table)])

    def _repr_html_(self) -> str:
        def cells(tag: str, row: tuple[Any, ...]) -> str:
            style = "text-align:left;padding:1px 14px 1px 0"
            return "".join(f'<{tag} style="{style}">{html.escape(str(c))}</{tag}>' for c in row)

        body = "".join(f"<tr>{cells('td', row)}</tr>" for row in self.rows)
        return (
            '<div class="distkit-card" style="border-left:3px solid #4477aa;padding:2px 12px;'
            'font-family:var(--jp-ui-font-family,sans-serif);font-size:var(--jp-ui-font-size1,13px)">'
            f"<b>{html.escape(self.title)}</b> · {html.escape(self.note)}"
            f'<table style="margin-top:4px"><tr>{cells("th", _COLUMNS)}</tr>{body}</table></div>'
        )


def status(room: Supervisor) -> Status:
    """The cluster now."""
    plan = room.plan
    stage = room.failure if room.stage == "failed" else room.stage
    parts = [plan.note or plan.backend, f"{count(plan.threads, 'thread')} a rank"]
    return Status(f"distkit cluster: {plan.what}", stage, " · ".join(parts), _rows(room))


def _rows(room: Supervisor) -> list[tuple[str, str, int | str, str, str]]:
    plan, processes = room.plan, room.processes
    rows = []
    for rank, known in processes.info().ranks.items():
        device = plan.seats[rank].where if rank < plan.ranks else known.device
        state = _state(room, rank, processes.children.get(rank))
        rows.append((known.name, known.host, known.pid, device, state))
    return rows


def _state(room: Supervisor, rank: int, child: Child | None) -> str:
    running = room.run
    if room.closed or room.stage == "failed" or (child and child.status is not None):
        return "ended"
    if child is None:
        return "idle" if room.ready.is_set() else "starting"
    if child.stopped[0]:
        return "stopped"
    if rank >= room.plan.ranks:
        return "serving"
    verb = "stepping" if running and running.stepped else "running"
    return f"{verb} {running.name}" if running and rank in running.waiting else "idle"


class Card:
    """Shows the status in the cell that made the cluster, and keeps it true."""

    def __init__(self, room: Supervisor) -> None:
        self._room = room
        self._shown: list[HtmlSnapshot] = []  # in notebooks
        self._last = ""
        self._lock = threading.Lock()

    def show(self) -> None:
        """Show it in the cell of a notebook that runs."""
        from distkit.views.widget.snapshot import HtmlSnapshot

        shown = HtmlSnapshot(self._draw)
        shown.alone = True
        self._shown.append(shown)
        shown.show({})

    def _draw(self) -> tuple[str, str]:
        now = status(self._room)
        return now._repr_html_(), repr(now)

    def refresh(self) -> None:
        """Something changed. Called from any thread."""
        if not self._shown:
            return
        from zmq import ZMQError

        with self._lock:
            now = repr(status(self._room))
            if now != self._last:
                self._last = now
                with suppress(ZMQError):  # the kernel is ending: nobody looks any more
                    for shown in self._shown:
                        shown.renew()
