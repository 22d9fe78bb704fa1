"""What the tests in a real JupyterLab share: running a cell, and looking in both themes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.lab import IDLE, command

RESULTS = Path(__file__).parents[2] / "test-results"

#: The new colours arrive by transitions; a dot that pulses for ever is none of them.
SETTLED = """() => Promise.all(document.getAnimations()
    .filter((a) => a.effect.getComputedTiming().endTime !== Infinity)
    .map((a) => a.finished.catch(() => {})))"""


def run_cell(page: Any, index: int, within: float = 60_000) -> None:
    """Run a cell and wait until the kernel is idle, at most ``within`` milliseconds."""
    page.evaluate("i => { jupyterapp.shell.currentWidget.content.activeCellIndex = i; }", index)
    command(page, "notebook:run-cell")
    page.wait_for_function(IDLE, timeout=within)


def look(page: Any, views: dict[str, Any], after: str = "") -> None:
    """Write a picture of each view in each theme: ``NAME-THEME[-AFTER].png``."""
    RESULTS.mkdir(exist_ok=True)
    for theme in ("Light", "Dark"):
        command(page, "apputils:change-theme", theme=f"JupyterLab {theme}")
        page.wait_for_selector(f"body[data-jp-theme-name='JupyterLab {theme}']", state="attached")
        page.wait_for_selector("#jupyterlab-splash", state="detached")
        page.evaluate(SETTLED)
        for name, view in views.items():
            file = RESULTS / f"{name}-{theme.lower()}{after}.png"
            view.screenshot(path=file, animations="disabled")
