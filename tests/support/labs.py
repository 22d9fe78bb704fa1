"""Helpers for tests in JupyterLab: run a cell, change the theme, save screenshots."""

from __future__ import annotations

from typing import Any

from sheets import RESULTS, settle

from benchmarks.lab import IDLE, command, notebook
from benchmarks.lab import run_cell as run_cell


def idle(page: Any) -> None:
    """Wait until the active notebook is open and its kernel is idle."""
    page.wait_for_function(IDLE)


def open_notebook(lab: Any, page: Any, file: str, *cells: str) -> None:
    """Write a notebook with these cells, open it, and wait until its kernel is idle."""
    (lab.root / file).write_text(notebook(*cells))
    page.goto(lab.address(file))
    idle(page)


def outputs(page: Any, awaited: str) -> list[str]:
    """Wait for a text in the outputs, and return the text of all outputs."""
    shown = page.locator(".jp-OutputArea-output")
    shown.filter(has_text=awaited).first.wait_for(state="attached")
    return list(shown.all_inner_texts())


def change_theme(page: Any, name: str) -> None:
    """Switch JupyterLab to the theme ``"Light"`` or ``"Dark"``.

    JupyterLab fails if the theme changes while the splash screen of the previous change is fading.
    """
    command(page, "apputils:change-theme", theme=f"JupyterLab {name}")
    page.wait_for_selector(f"body[data-jp-theme-name='JupyterLab {name}']", state="attached")
    page.wait_for_selector("#jupyterlab-splash", state="detached")


def save_screenshots(page: Any, views: dict[str, Any]) -> None:
    """Save a screenshot of each view as ``NAME.png``."""
    RESULTS.mkdir(exist_ok=True)
    settle(page)
    for name, view in views.items():
        view.screenshot(path=RESULTS / f"{name}.png", animations="disabled")
