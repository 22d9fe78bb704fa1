"""Two runs compared in a real JupyterLab, one of them while it goes on."""

from __future__ import annotations

from typing import Any

from labs import idle, look, run_cell
from sheets import settle

from benchmarks.lab import notebook

START = """
from pathlib import Path
import torch, torch.distributed as dist, torch.nn.functional as F
import distkit as dk

cluster = dk.Cluster(4).wait()
go = Path("go").absolute()

def train(all_reduce, until=None, least=12):
    images, labels = dk.shard(*dk.demos.digits())
    net, steps, stop = dk.demos.model(), 0, torch.zeros(1)
    with dk.watch_gradients(net) as watch:
        while not stop:
            rows = torch.arange(32 * steps, 32 * steps + 32) % 448
            batch = images[rows], labels[rows]
            loss = dk.sync_sgd_step(net, batch, F.cross_entropy, 0.2, all_reduce=all_reduce)
            watch.step(loss=loss, lr=0.2, samples=32)
            steps += 1
            stop += steps >= least and (until is None or until.exists())
            dist.all_reduce(stop)  # all of them, or none

own = cluster.run(train, dk.ring_all_reduce)
"""
LIVE = """
other = cluster.submit(train, dist.all_reduce, go)
dk.Compare({"ring": own, "torch": other})
"""
WAIT = "go.touch()\nother.wait()\ncluster.stop()"


def live(lab: Any, page: Any, name: str) -> Any:
    """The comparison of a run with one that goes on, in a notebook of this name."""
    (lab.root / name).write_text(notebook(START, LIVE, WAIT))
    page.goto(lab.address(name))
    idle(page)
    for cell in (0, 1):
        run_cell(page, cell)
    view = page.locator(".distkit-compare[data-drawn]")
    view.locator(".dkc-title .dk-live").wait_for()
    return view


def test_a_run_beside_one_that_goes_on(lab: Any, tab: Any) -> None:
    page = tab.page
    view = live(lab, page, "compare.ipynb")
    cells = page.locator(".jp-Cell").count()
    page.wait_for_selector(".distkit-compare[data-layout=overlaid]")
    run_cell(page, 2)
    page.wait_for_function("() => !document.querySelector('.distkit-compare .dk-live')")
    steps = view.locator("tr[data-key=steps] td b")
    steps.first.filter(has_text="12").wait_for()
    settle(page)
    assert int(steps.nth(1).inner_text()) >= 12
    assert view.locator(".dkv-curve").count() == 4
    assert "messages inside the backend's" in view.locator(".dk-notices").inner_text()

    view.locator("canvas").focus()
    for key in ("ArrowDown", "n", "+", "ArrowRight", "b", "o"):
        page.keyboard.press(key)
    page.wait_for_selector(".distkit-compare[data-layout=side][data-clock=duration]")
    settle(page)
    assert view.locator("th button[aria-pressed=true]").inner_text().startswith("torch")
    assert page.locator(".jp-Cell").count() == cells  # no key came through to JupyterLab
    page.keyboard.press("n")
    page.set_viewport_size({"width": 1280, "height": 2600})  # all of it, beside no toolbar
    look(page, {"lab-compare": view})
    assert tab.errors == [] and tab.outside == []
