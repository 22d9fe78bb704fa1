"""The card of a cluster as a widget: unlike plain HTML it hears when its kernel ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import anywidget
import traitlets

from distkit.views.widget.assets import FORMAT, css, esm
from distkit.views.widget.snapshot import HtmlSnapshot

if TYPE_CHECKING:
    from distkit.cluster.card import Status


class StatusWidget(anywidget.AnyWidget):
    """Shows the status of a cluster, in as many cells as one likes.

    Args:
        columns: the names of a row's parts.
        status: of the cluster now.
    """

    _esm = esm("status")
    _css = css("status")
    picture = traitlets.Dict().tag(sync=True)

    def __init__(self, columns: Sequence[str], status: Status) -> None:
        self._columns, self._status = columns, status
        self._stills: list[HtmlSnapshot] = []
        super().__init__(picture=self._told())

    def _told(self) -> dict[str, object]:
        now = self._status
        return {
            "format": FORMAT,
            "what": now.what,
            "stage": now.stage,
            "note": now.note,
            "columns": self._columns,
            "rows": now.rows,
        }

    def _draw(self) -> tuple[str, str]:
        return self._status._repr_html_(), repr(self._status)

    def show(self) -> None:
        """Display it in the cell that runs."""
        still = HtmlSnapshot(self._draw, lambda: self._status.stage != "stopped")
        data, metadata = self._repr_mimebundle_() or ({}, {})
        still.show(data, metadata)
        self._stills.append(still)

    def update(self, status: Status) -> None:
        """Show that. From any thread."""
        self._status = status
        self.picture = self._told()
        for still in self._stills:
            still.renew()
