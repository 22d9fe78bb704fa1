"""The status card: a live display of a cluster's processes and their states in a notebook."""

from __future__ import annotations

import html
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from distkit._format import aligned, count
from distkit.views.scene.theme import GRAY, GRAY_DARK, RANKS_DARK, RANKS_LIGHT

if TYPE_CHECKING:
    from distkit.cluster.processes.fork_client import Child
    from distkit.cluster.supervisor import Supervisor
    from distkit.views.widget.snapshot import HtmlSnapshot

_COLUMNS = ("node", "host", "pid", "device", "state")
#: Style of the card, which resembles the views and has a chip for each process.
_STYLE = """
.distkit-card { padding: 10px 18px 13px; max-width: 1600px; border-radius: 12px;
  border: 1px solid var(--jp-border-color2, #c8ced4);
  font: 13px/1.45 var(--jp-ui-font-family, sans-serif); }
.jp-RenderedHTMLCommon > .distkit-card { margin-right: -20px; }  /* as wide as the cells */
.distkit-card > b { font-size: 16px; margin-right: 8px; }
.distkit-card :is(span, .quiet) { color: var(--jp-ui-font-color2, #6b7785); }
.distkit-card ul { display: grid; gap: 8px; padding: 0 !important; margin: 9px 0 0 !important;
  grid-template-columns: repeat(auto-fill, minmax(215px, 1fr)); }
.distkit-card li { display: grid; grid-template-columns: auto 1fr auto; gap: 0 9px; margin: 0;
  align-items: center; list-style: none; padding: 6px 12px 7px; border-radius: 8px;
  border-left: 4px solid var(--light);
  background: color-mix(in srgb, currentColor 5%, transparent); }
.distkit-card i { width: 10px; height: 10px; border-radius: 50%; background: var(--light); }
.distkit-card li span { grid-column: 2 / 4; }
.distkit-card em { padding: 0 9px; border: 1px solid; border-radius: 999px; font-style: normal;
  font-weight: 600; white-space: nowrap; }
.distkit-card em.quiet { border-color: var(--jp-border-color2, #c8ced4); font-weight: 400; }
body[data-jp-theme-light="false"] .distkit-card li { border-color: var(--dark); }
body[data-jp-theme-light="false"] .distkit-card i { background: var(--dark); }
"""


@dataclass(frozen=True)
class Status:
    """A snapshot of a cluster. Each row is (node, host, pid, device, state)."""

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
        one_host, on_cpu = len({r[1] for r in self.rows}) < 2, {r[3] for r in self.rows} <= {"cpu"}
        chips = "".join(_chip(n, *row, one_host, on_cpu) for n, row in enumerate(self.rows))
        return (
            f'<style>{_STYLE}</style><div class="distkit-card"><b>{html.escape(self.title)}</b> '
            f"<span>{html.escape(self.note)}</span><ul>{chips}</ul></div>"
        )


def _chip(
    number: int,
    name: str,
    host: str,
    pid: int | str,
    device: str,
    state: str,
    one_host: bool,
    on_cpu: bool,
) -> str:
    """Return the HTML for one process.

    ``one_host`` is True if all processes are on one host, ``on_cpu`` if all use the CPU.
    """
    details = [device * (not on_cpu), f"on {host}" * (not one_host)]
    process = f' title="pid {pid}"' * bool(pid)
    quiet = ' class="quiet"' * (state in ("idle", "stopped"))
    light, dark = (
        (GRAY, GRAY_DARK)
        if name == "scheduler"
        else (palette[number % len(palette)] for palette in (RANKS_LIGHT, RANKS_DARK))
    )
    return (
        f'<li style="--light:{light};--dark:{dark}"{process}><i></i><b>{html.escape(name)}</b> '
        f"<em{quiet}>{html.escape(state)}</em> "
        f"<span>{html.escape(' · '.join(filter(None, details)))}</span></li>"
    )


def status(supervisor: Supervisor) -> Status:
    """Return the current status of the cluster."""
    plan, processes, run = supervisor.plan, supervisor.processes, supervisor.run
    busy = supervisor.stage == "ready" and run and run.unfinished and not run.stepped
    return Status(
        f"distkit cluster: {plan.description}",
        supervisor.failure
        if supervisor.stage == "failed"
        else "running"
        if busy
        else supervisor.stage,
        f"{plan.note or plan.backend} · {count(plan.threads, 'thread')} per rank",
        [
            (r.name, r.host, r.pid, r.device, _state(supervisor, n, processes.children.get(n)))
            for n, r in processes.info().ranks.items()
        ],
    )


def _state(supervisor: Supervisor, rank: int, child: Child | None) -> str:
    run = supervisor.run
    if supervisor.closed or supervisor.stage == "failed" or (child and child.status is not None):
        return "stopped" if supervisor.closed else "ended"
    if child is None:
        return "idle" if supervisor.stage == "ready" or supervisor.ready.is_set() else "starting"
    if rank >= supervisor.plan.ranks:
        return "serving"
    verb = "stepping" if run and run.stepped else "running"
    return f"{verb} {run.name}" if run and rank in run.unfinished else "idle"


class Card:
    """Shows a cluster's live status in one or more notebook cells."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._snapshots: list[HtmlSnapshot] = []  # one for each cell that shows the card

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
        """Update the card in every cell that shows it. May be called from any thread."""
        if not self._snapshots:
            return
        from zmq import ZMQError

        with suppress(ZMQError):  # the kernel is exiting
            for snapshot in self._snapshots:
                snapshot.refresh()
