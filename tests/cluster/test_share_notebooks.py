"""Static pictures of views: in saved notebooks, web pages, and JupyterLab without a kernel."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from labs import idle, open_notebook
from nbclient import NotebookClient
from nbformat import NotebookNode
from sheets import RESULTS

from benchmarks.lab import command

WIDGET = "application/vnd.jupyter.widget-view+json"
STATE = "application/vnd.jupyter.widget-state+json"

START = """
import torch, torch.distributed as dist
import distkit as dk

def train(steps=3):
    w = torch.nn.Linear(2, 2)
    with dk.watch_gradients(w) as watch:
        for _ in range(steps):
            w.zero_grad()
            w(torch.ones(1, 2)).sum().backward()
            for p in w.parameters():
                dist.all_reduce(p.grad)
            watch.step(loss=1.0)
    dk.algorithms.ring_all_reduce(torch.ones(8))

cluster = dk.Cluster(2).wait()
trace = dk.run_ranks(train, 2).trace
"""
#: Cells that each show a view, and a text in the view's picture.
VIEWS = {
    "dk.Timeline(trace)": "messages",
    "dk.Stage(trace)": "the chunks are added",
    "dk.Tensors(trace)": "all_reduce",
    "dk.Gradients(trace)": "norm ",
    "trace": "messages",
    "run = cluster.submit(train, 2); live = dk.Timeline(run); live": "messages",
    "run.wait(); stepper = cluster.step(train, 1); stepper": "train: step",
}
END = """stepper.finish()
stepper._cockpit._refresh()  # update the picture now"""
SLOW = """
import time

def slow():
    for _ in range(8):
        dist.all_reduce(torch.ones(3))
        time.sleep(0.2)
"""
#: Cells with watched runs; they are not in the saved notebook.
WATCHED = (SLOW, "run = cluster.run(slow)", "cluster.run(slow)", "cluster.stop()")

#: In the page: for each view, whether its picture, its widget and the widget's figure are visible.
#: The cluster's card has no picture and is skipped.
VISIBILITY = """() => [...document.querySelectorAll('.distkit-still:has(img)')].map((still) => {
    const output = still.closest('.jp-OutputArea-child'), image = still.querySelector('img');
    const next = output.nextElementSibling;
    return [image.checkVisibility() && image.complete && image.naturalWidth > 900 &&
                image.getBoundingClientRect().height > 100,
            Boolean(next?.checkVisibility() &&
                    (next.innerText.trim() || next.querySelector('figure'))),
            Boolean(next?.querySelector('figure')?.checkVisibility())];
})"""
STILL, LIVE = (True, False, False), (False, True, True)


@pytest.fixture(scope="module")
def all_cells(jupyter_home: Path) -> NotebookNode:
    cells = [nbformat.v4.new_code_cell(source) for source in (START, *VIEWS, END, *WATCHED)]
    completed = nbformat.v4.new_notebook(cells=cells)
    NotebookClient(completed, timeout=240, kernel_name="python3").execute()
    return completed


@pytest.fixture(scope="module")
def executed(all_cells: NotebookNode) -> NotebookNode:
    return nbformat.from_dict({**all_cells, "cells": all_cells.cells[: -len(WATCHED)]})


def without_state(completed: NotebookNode) -> NotebookNode:
    """Return a notebook as JupyterLab saves it by default."""
    plain = copy.deepcopy(completed)
    del plain.metadata["widgets"]
    return plain


def test_each_view_saves_a_picture_and_a_widget(executed: NotebookNode) -> None:
    assert executed.metadata["widgets"][STATE]["state"]
    for cell, text in zip(executed.cells[1:-1], VIEWS.values(), strict=True):
        still, widget = (output.data for output in cell.outputs)
        assert text in still["text/plain"], cell.source
        assert "distkit-still" in still["text/html"] and still["image/svg+xml"].startswith("<svg ")
        assert len(still["text/html"]) < 150_000
        assert WIDGET in widget and widget["text/html"] == ""


def test_pictures_of_live_and_stepped_runs_show_the_end_of_the_run(executed: NotebookNode) -> None:
    live, whole = executed.cells[-3].outputs[0].data, executed.cells[1].outputs[0].data
    for text in ("4 messages (64 B)", "4 collectives"):  # of two steps; the run of three has six
        assert text in live["text/plain"]
    assert "6 collectives" in whole["text/plain"]
    message = executed.cells[-2].outputs[0].data["text/plain"]
    assert "before the first step" not in message and "finished" in message


def test_nbconvert_shows_the_pictures_offline(
    tab: Any, tmp_path: Path, executed: NotebookNode
) -> None:
    notebooks = {"with-state": executed, "without-state": without_state(executed)}
    files = [tmp_path / f"{name}.ipynb" for name in notebooks]
    for file, one in zip(files, notebooks.values(), strict=True):
        nbformat.write(one, file)
    convert = [sys.executable, "-m", "jupyter", "nbconvert", "--to", "html", *map(str, files)]
    completed = subprocess.run(convert, capture_output=True, text=True, timeout=240)
    assert completed.returncode == 0 and "not able to be represented" not in completed.stderr, (
        completed.stderr
    )
    RESULTS.mkdir(exist_ok=True)
    for file in files:
        tab.page.goto(file.with_suffix(".html").as_uri(), wait_until="domcontentloaded")
        wait_for(tab.page, STILL)
        tab.page.screenshot(path=RESULTS / f"nbconvert-{file.stem}.png", full_page=True)


def test_jupyterlab_without_a_kernel_shows_the_pictures(
    lab: Any, tab: Any, executed: NotebookNode
) -> None:
    """JupyterLab does not trust notebooks from other authors."""
    nbformat.write(without_state(executed), lab.root / "stay.ipynb")
    open_without_kernel(lab, tab.page, "stay.ipynb")
    wait_for(tab.page, STILL)
    RESULTS.mkdir(exist_ok=True)
    tab.page.screenshot(path=RESULTS / "lab-stay.png")
    assert tab.external_requests == [] and not [e for e in tab.errors if "distkit" in e]


def test_live_view_replaces_its_picture(lab: Any, tab: Any) -> None:
    code = [
        "import distkit as dk",
        "from distkit.events import Event, Op, State",
        "t = dk.Trace([Event(0, 0, Op.SEND, State.STARTED, 0.0, peer=1, nbytes=4)])",
        "dk.Timeline(t)",
    ]
    open_notebook(lab, tab.page, "live.ipynb", "\n".join(code), "dk.Stage(t)")
    command(tab.page, "notebook:run-all-cells")
    tab.page.wait_for_selector(".distkit-stage")
    wait_for(tab.page, LIVE, 2)
    command(tab.page, "docmanager:save")
    tab.page.wait_for_function("() => !jupyterapp.shell.currentWidget.context.model.dirty")
    state = json.loads((lab.root / "live.ipynb").read_text())["metadata"].get("widgets")
    assert state is None or state[STATE]["state"]
    assert tab.errors == [] and tab.external_requests == []


def open_without_kernel(lab: Any, page: Any, name: str, shown: str = ".distkit-still") -> None:
    page.set_viewport_size({"width": 1280, "height": 9000})
    page.goto(f"{lab.url}/lab?reset&token={lab.token}")
    page.wait_for_function("() => window.jupyterapp")
    page.evaluate("() => jupyterapp.restored")
    page.evaluate(
        """path => jupyterapp.commands.execute('docmanager:open', { path, factory: 'Notebook',
            kernelPreference: { shouldStart: false, canStart: false } })""",
        name,
    )
    page.wait_for_selector(shown, state="attached")


def wait_for(page: Any, state: tuple[bool, ...], views: int = len(VIEWS)) -> None:
    """Wait until every view has this visibility."""
    page.wait_for_function(
        f"(wanted) => JSON.stringify(({VISIBILITY})()) === JSON.stringify(wanted)",
        arg=[state] * views,
    )


def test_live_run_collapses_to_a_line(all_cells: NotebookNode) -> None:
    """The timeline is shown once: in that line, or as the value of the cell."""

    def shown(cell: NotebookNode) -> list[str]:
        return [output.get("data", {}).get("text/html", "") for output in cell.outputs]

    _, first, second, _ = all_cells.cells[-len(WATCHED) :]
    folded, widget = shown(first)
    assert "<summary>Timeline of slow: 2 ranks, gloo, 8 collectives" in folded and widget == ""
    removed, _, still, _ = shown(second)
    assert "<summary>" not in removed + still
    assert "<img" not in removed and "<img" in still


def test_folded_timeline_expands_to_the_widget_or_without_a_kernel_to_its_picture(
    lab: Any, tab: Any
) -> None:
    page, start = tab.page, f"{START}{SLOW}"
    open_notebook(lab, page, "folded.ipynb", start, WATCHED[1], WATCHED[-1])
    command(page, "notebook:run-all-cells")
    idle(page)
    line, canvas = page.locator(".distkit-folded summary"), page.locator(".distkit-timeline canvas")
    picture = page.locator(".distkit-folded img")
    assert line.count() == 1 and not canvas.is_visible() and not picture.is_visible()
    line.click()
    canvas.wait_for(state="visible")
    assert page.locator(".distkit-timeline").get_by_text("Find").is_visible()
    assert not picture.is_visible()
    command(page, "docmanager:save")
    page.wait_for_function("() => !jupyterapp.shell.currentWidget.context.model.dirty")
    (lab.root / "folded.ipynb").rename(lab.root / "stopped.ipynb")
    open_without_kernel(lab, page, "stopped.ipynb", ".distkit-folded")
    line.click()
    picture.wait_for(state="visible")
