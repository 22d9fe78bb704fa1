"""Tensors and gradients of real ranks, in a real JupyterLab, live and side by side."""

from __future__ import annotations

from typing import Any

from labs import idle, look, run_cell

from benchmarks.lab import notebook

START = """
import torch, torch.distributed as dist, torch.nn.functional as F
import distkit as dk

cluster = dk.Cluster(4).wait()

def train(steps=24):
    images, labels = dk.shard(*dk.demos.digits())
    net = dk.demos.model()
    with dk.watch_gradients(net) as watch:
        for rows in (steps * torch.arange(448).split(32))[:steps]:
            loss = dk.sync_sgd_step(net, (images[rows], labels[rows]), F.cross_entropy, 0.2)
            watch.step(loss=loss, lr=0.2, samples=len(rows))
"""
LIVE = "run = cluster.submit(train)\ndk.Gradients(run)"
WAIT = "run.wait()\ncluster.stop()"
TENSORS = "dk.Tensors(run)"


def test_gradients_grow_and_tensors_are_walked_through(lab: Any, tab: Any) -> None:
    (lab.root / "values.ipynb").write_text(notebook(START, LIVE, WAIT, TENSORS))
    page = tab.page
    page.goto(lab.address("values.ipynb"))
    idle(page)
    for cell in (0, 1, 2):
        run_cell(page, cell)
    gradients = page.locator(".distkit-gradients")
    gradients.locator(".dkv-same", has_text="the mean of all 4").wait_for()
    page.wait_for_function("() => !document.querySelector('.distkit-gradients .dk-live')")
    gradients.locator(".dkv-slider").focus()
    page.keyboard.press("End")
    page.wait_for_function(
        "() => document.querySelector('.distkit-gradients .dkv-where').textContent === 'step 24'"
    )
    run_cell(page, 3)
    tensors = page.locator(".distkit-tensors")
    tensors.locator(".dkv-slider").focus()
    page.keyboard.press("ArrowRight")
    page.wait_for_function(
        "() => document.querySelector('.distkit-tensors .dkv-what').textContent"
        ".includes('operation 2 of')"
    )
    assert "after\nthe same on all" in tensors.locator(".dkv-verdicts").inner_text()
    page.set_viewport_size({"width": 1280, "height": 3200})  # all of it, beside no toolbar
    look(page, {"lab-gradients": gradients, "lab-tensors": tensors})
    assert tab.errors == [] and tab.outside == []
