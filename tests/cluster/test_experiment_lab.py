"""An experiment in JupyterLab: controls, progress, Stop, a sweep and an error."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from labs import change_theme, open_notebook, outputs, run_cell, save_screenshots

START = """
import time
import torch, torch.distributed as dist, torch.nn.functional as F
import distkit as dk

cluster = dk.Cluster(4)
"""
PANEL = """
def train(batch=32, lr=0.2, algorithm="ring", steps=10, fail=False):
    images, labels = dk.data.shard(*dk.data.digits())
    net = dk.demos.model()
    reduce = dk.algorithms.ring_all_reduce if algorithm == "ring" else dist.all_reduce
    with dk.watch_gradients(net) as watch:
        for step in range(steps):
            rows = torch.arange(step * batch, (step + 1) * batch) % len(images)
            mine = images[rows], labels[rows]
            loss = dk.algorithms.sync_sgd_step(net, mine, F.cross_entropy, lr, all_reduce=reduce)
            watch.step(loss=loss, lr=lr, samples=batch)
            if steps > 10:  # gives the browser time, and keeps the trace short
                time.sleep(0.1)
            if fail and dist.get_rank() == 1:
                raise RuntimeError("on purpose")
    return {"loss": loss.item()}

experiment = dk.Experiment(
    train, cluster, batch=(8, 128), lr=(0.01, 1.0), algorithm=["ring", "gloo"], ranks=(2, 6),
    straggler=(0, 0.5), fail=False, steps=[10, 100_000],
)
experiment
"""
RUNS = "print([(p['batch'], p['steps'], p['fail']) for p, run in experiment.runs])"
SWEEP = "experiment.sweep(batch=[8, 32, 128], algorithm=['ring', 'gloo'], steps=10, fail=False);"
CLOSE = "experiment.close(); print('after', cluster.run(dist.get_rank).results); cluster.stop()"

ROWS = ".distkit-experiment .dkx-table tr"


@pytest.fixture
def page(lab: Any, tab: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
    """A new notebook whose first two cells have run and show the panel."""
    page = tab.page
    open_notebook(lab, page, f"{request.node.name}.ipynb", START, PANEL, RUNS, SWEEP, CLOSE)
    for cell in (0, 1):
        run_cell(page, cell)
    page.locator(".distkit-experiment .dkx-run").wait_for()
    yield page
    assert tab.errors == []
    assert tab.external_requests == []


def control(page: Any, name: str) -> Any:
    """Return the row of a control."""
    label = page.locator(".widget-label", has_text=name)
    return page.locator(".dkx-controls > .widget-inline-hbox", has=label)


def tab_of(panel: Any, name: str) -> Any:
    return panel.locator(".lm-TabBar-tab", has_text=name)


def press_run(page: Any, rows: int) -> None:
    """Press Run, and wait until the table has ``rows`` rows."""
    page.locator(".distkit-experiment .dkx-run").click()
    page.wait_for_function(f"() => document.querySelectorAll('{ROWS}').length === {rows + 1}")
    page.locator(".dkx-run:not([disabled])").wait_for()


def test_experiment_works_in_jupyterlab(page: Any) -> None:
    control(page, "batch").locator(".noUi-handle").focus()
    for _ in range(5):
        page.keyboard.press("ArrowRight")
    press_run(page, 1)  # immediately: the pending value of the slider is used
    panel = page.locator(".distkit-experiment")
    page.set_viewport_size({"width": 1712, "height": 1600})  # the panel is then 1280 wide
    tab_of(panel, "Timeline").click()
    panel.locator(".distkit-timeline", has_text="train").first.wait_for()
    tab_of(panel, "Runs").click()
    assert panel.bounding_box()["width"] == 1280 and panel.bounding_box()["height"] <= 640
    assert not page.locator(".distkit-still").first.is_visible()  # because the panel is shown

    control(page, "algorithm").locator("select").select_option(label="gloo")
    control(page, "steps").locator("select").select_option(index=1)
    page.locator(".dkx-run").click()
    panel.locator(".dkx-words", has_text="step ").wait_for()
    assert panel.locator(".dkx-run").is_disabled()
    save_screenshots(page, {"experiment-running": page.locator(".distkit-experiment")})
    panel.locator(".dkx-stop").click()
    panel.locator(".dkx-note", has_text="train was stopped on all ranks").wait_for()

    control(page, "algorithm").locator("select").select_option(label="ring")
    control(page, "steps").locator("select").select_option(index=0)
    control(page, "ranks").locator(".noUi-handle").focus()
    page.keyboard.press("ArrowLeft")
    press_run(page, 3)  # on a new cluster of three ranks
    page.locator("label", has_text="fail").locator("input").check()
    press_run(page, 4)
    error = panel.locator(".dkx-error", has_text="RankError rank 1 raised RuntimeError")
    error.wait_for()
    reported = error.inner_text()
    assert "RankError rank 1 raised RuntimeError: on purpose" in reported and "line" in reported
    save_screenshots(page, {"experiment-failed": page.locator(".distkit-experiment")})

    run_cell(page, 2)
    message = outputs(page, "[(37, 10, False)")
    assert "[(37, 10, False), (37, 100000, False), (37, 10, False), (37, 10, True)]\n" in message

    run_cell(page, 3)
    page.locator(".jp-Cell").nth(3).locator(".distkit-picture").wait_for()
    panel.locator(".dkx-chart", has_text="algorithm=gloo").wait_for()
    panel.locator(".dkx-chart text", has_text="loss").wait_for()
    rows = panel.locator(".dkx-table tr[data-run]")
    assert tab_of(panel, "Stage").count() == 0  # gloo's messages are not recorded
    rows.nth(1).click()  # a run with the ring
    for name in ("Stage", "Gradients", "Timeline"):
        tab_of(panel, name).click()
        panel.locator(f".distkit-{name.lower()}").first.wait_for()
        save_screenshots(page, {f"experiment-{name.lower()}": panel})
    tab_of(panel, "Runs").click()
    save_screenshots(page, {"experiment": panel})
    rows.nth(4).click()  # shows the views of run 6
    tab_of(panel, "Timeline of run 6").wait_for()
    rows.first.focus()
    page.keyboard.press("Enter")
    tab_of(panel, "Timeline of run 10").wait_for()
    assert panel.locator(".dkx-table [aria-current]").get_attribute("data-run") == "10"
    assert page.evaluate("document.activeElement.dataset.run") == "10"  # the row keeps the focus
    run_cell(page, 4)
    outputs(page, "after [0, 1, 2, 3]")
    page.locator(".distkit-experiment").wait_for(state="detached")
    kept = page.locator(".jp-Cell").nth(1).locator(".distkit-still img")
    kept.wait_for()
    assert "10 runs" in str(kept.get_attribute("alt"))
    assert page.locator(".jp-Cell").nth(1).locator(".distkit-still table tr").count() == 11
    change_theme(page, "Dark")
    save_screenshots(page, {"experiment-closed-dark": page.locator(".jp-Cell").nth(1)})
