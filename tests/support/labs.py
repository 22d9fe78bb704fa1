"""What the tests in a real JupyterLab share: running a cell, changing the theme, pictures."""

from __future__ import annotations

from typing import Any

from sheets import RESULTS, settle

from benchmarks.lab import IDLE, command


def idle(page: Any) -> None:
    """Wait until the notebook in front is open and its kernel has nothing to do."""
    page.wait_for_function(IDLE)


def run_cell(page: Any, index: int) -> None:
    """Run a cell and wait until the kernel is idle."""
    page.evaluate("i => { jupyterapp.shell.currentWidget.content.activeCellIndex = i; }", index)
    command(page, "notebook:run-cell")
    idle(page)


def outputs(page: Any, awaited: str) -> list[str]:
    """The words of all outputs, once one of them has those that are awaited."""
    shown = page.locator(".jp-OutputArea-output")
    shown.filter(has_text=awaited).first.wait_for(state="attached")
    return list(shown.all_inner_texts())


def change_theme(page: Any, name: str) -> None:
    """Have JupyterLab take its theme ``"Light"`` or ``"Dark"``, and wait until it has.

    A change that comes while the splash of the one before fades makes JupyterLab take the splash
    away twice, which throws.
    """
    command(page, "apputils:change-theme", theme=f"JupyterLab {name}")
    page.wait_for_selector(f"body[data-jp-theme-name='JupyterLab {name}']", state="attached")
    page.wait_for_selector("#jupyterlab-splash", state="detached")


def category(page: Any, views: dict[str, Any]) -> None:
    """Write a picture of each view as it is: ``NAME.png``."""
    RESULTS.mkdir(exist_ok=True)
    settle(page)
    for name, view in views.items():
        view.screenshot(path=RESULTS / f"{name}.png", animations="disabled")
