"""How far an experiment has come: a progress bar, a line of words, and a Stop button."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ipywidgets

from distkit.experiments.activity import Activity, words
from distkit.views.scene.units import human_seconds

if TYPE_CHECKING:
    from distkit.experiments.experiment import Experiment

#: Parts of the bar.
WHOLE = 1000


@cache
def css() -> str:
    """The style sheet of bar and panel."""
    return Path(__file__).with_name("panel.css").read_text(encoding="utf-8")


def sheet() -> Any:
    """The style sheet as a widget, to stand beside what it styles."""
    return ipywidgets.HTML(f"<style>{css()}</style>", layout={"display": "none"})


class Bar:
    """Moves with an experiment; without known end it only says that something moves.

    Args:
        stop: what the Stop button calls.
    """

    def __init__(self, stop: Callable[[], None]) -> None:
        self.progress = ipywidgets.IntProgress(max=WHOLE, layout={"width": "auto"})
        self.words = ipywidgets.HTML()
        self.stop = ipywidgets.Button(
            description="Stop", icon="stop", tooltip="End the run on every rank", disabled=True
        )
        self.stop.on_click(lambda _: stop())
        self.progress.add_class("dkx-bar")
        self.words.add_class("dkx-words")
        self.stop.add_class("dkx-stop")
        self._parts = [sheet(), self.stop, self.progress, self.words]
        self.widget = ipywidgets.HBox(self._parts)
        self.widget.add_class("dkx-row")

    def refresh(self, experiment: Experiment) -> None:
        """Show where the experiment is now."""
        now = experiment.activity
        self.stop.disabled = now is None or now.stopping or now.over
        if now is None:
            self._unknown(False)
            self.progress.value, self.words.value = 0, ""
            return
        share = None if not now.total or now.done is None or now.over else now.done / now.total
        self._unknown(share is None)
        self.progress.value = WHOLE if share is None else round(WHOLE * share)
        self.words.value = f"<span aria-live=polite>{escape(words(now))}</span> {_elapsed(now)}"

    def _unknown(self, unknown: bool) -> None:
        """Whether nobody knows when it will end."""
        (self.progress.add_class if unknown else self.progress.remove_class)("dkx-unknown")

    def close(self) -> None:
        """Take it off the page."""
        for part in (*self._parts, self.widget):
            part.close()


def _elapsed(now: Activity) -> str:
    return f"<i>{escape(human_seconds(round(time.monotonic() - now.since, 1)))}</i>"
