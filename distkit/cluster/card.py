"""The status card, which shows a cluster's processes and their states live in a notebook."""

from __future__ import annotations

import html
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from distkit._format import aligned, count

if TYPE_CHECKING:
    from distkit.cluster.processes.fork_client import Child
    from distkit.cluster.supervisor import Supervisor
    from distkit.views.widget.snapshot import HtmlSnapshot

_COLUMNS = ("node", "host", "pid", "device", "state")


@dataclass(frozen=True)
class Status:
    """A snapshot of a cluster: each of ``rows`` is (node, host, pid, device, state)."""

    description: str
    stage: str
    note: str
    rows: list[tuple[str, str, int | str, str, str]]

    @property
    def title(self) -> str:
        """A one-line summary of the cluster."""
        return f"{self.description} · {self.stage}"

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


def status(supervisor: Supervisor) -> Status:
    """Return the current status of the cluster."""
    plan = supervisor.plan
    stage = supervisor.failure if supervisor.stage == "failed" else supervisor.stage
    parts = [plan.note or plan.backend, f"{count(plan.threads, 'thread')} per rank"]
    return Status(
        f"distkit cluster: {plan.description}", stage, " · ".join(parts), _rows(supervisor)
    )


def _rows(supervisor: Supervisor) -> list[tuple[str, str, int | str, str, str]]:
    plan, processes = supervisor.plan, supervisor.processes
    rows = []
    for rank, info in processes.info().ranks.items():
        device = plan.devices[rank] if rank < plan.ranks else info.device
        state = _state(supervisor, rank, processes.children.get(rank))
        rows.append((info.name, info.host, info.pid, device, state))
    return rows


def _state(supervisor: Supervisor, rank: int, child: Child | None) -> str:
    running = supervisor.run
    if supervisor.closed or supervisor.stage == "failed" or (child and child.status is not None):
        return "ended"
    if child is None:
        return "idle" if supervisor.ready.is_set() else "starting"
    if rank >= supervisor.plan.ranks:
        return "serving"
    verb = "stepping" if running and running.stepped else "running"
    return f"{verb} {running.name}" if running and rank in running.waiting else "idle"


class Card:
    """The status in the output of the cell that created the cluster, updated live."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._snapshots: list[HtmlSnapshot] = []  # one per display in a notebook

    def show(self) -> None:
        """Show the card in the notebook cell that is running."""
        from distkit.views.widget.snapshot import HtmlSnapshot

        snapshot = HtmlSnapshot(self._draw)
        snapshot.standalone = True
        self._snapshots.append(snapshot)
        snapshot.show({})

    def _draw(self) -> tuple[str, str]:
        current = status(self._supervisor)
        return current._repr_html_(), repr(current)

    def refresh(self) -> None:
        """Show the current status. May be called from any thread."""
        if not self._snapshots:
            return
        from zmq import ZMQError

        with suppress(ZMQError):  # the kernel is exiting
            for snapshot in self._snapshots:
                snapshot.refresh()
