"""The server view of real workers and servers, in a real JupyterLab, while the run goes on."""

from __future__ import annotations

from typing import Any

from labs import idle, look, run_cell
from sheets import settle

from benchmarks.lab import notebook

START = """
import torch
import distkit as dk
from distkit import kvstore

cluster = dk.Cluster(workers=3, servers=2).wait()

def train(mode, steps=8):
    kv = kvstore.create(mode, bigarray_bound=4096)
    weights = {"embedding": torch.zeros(64, 64), "weight": torch.zeros(64, 10), "bias": torch.zeros(10)}
    keys, values = list(weights), list(weights.values())
    kv.init(keys, values)
    kv.set_optimizer(kvstore.SGD(learning_rate=0.1))
    for step in range(steps):
        kv.pull(keys, out=values)
        with dk.mark("gradient"):
            for _ in range(20 * (1 + 4 * kv.rank)):
                torch.rand(64, 64) @ torch.rand(64, 64)
        kv.push(keys, [torch.ones_like(w) for w in values])
    kv.barrier()
"""  # noqa: E501
LIVE = 'run = cluster.submit(train, "dist_sync")\ndk.Servers(run)'
WAIT = "run.wait()"
ASYNC = 'free = cluster.run(train, "dist_async")\ncluster.stop()\ndk.Servers(free)'


def test_gradients_gather_and_grow_stale(lab: Any, tab: Any) -> None:
    (lab.root / "servers.ipynb").write_text(notebook(START, LIVE, WAIT, ASYNC))
    page = tab.page
    page.emulate_media(reduced_motion="reduce")
    page.goto(lab.address("servers.ipynb"))
    idle(page)
    for cell in (0, 1, 2):
        run_cell(page, cell)
    views = page.locator(".distkit-servers")
    views.first.locator(".mark-card").first.wait_for()
    page.wait_for_function("() => !document.querySelector('.distkit-servers .dk-live')")
    sync = views.first
    sync.focus()
    page.keyboard.press("End")
    sync.locator(".dkm-main .mark-version", has_text="v8").first.wait_for()
    settle(page)
    assert set(sync.locator(".dkm-main .mark-version").all_text_contents()) == {"v8"}
    page.keyboard.press("PageUp")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("a")  # JupyterLab would insert a cell
    assert page.locator(".jp-Notebook .jp-CodeCell").count() == 4

    run_cell(page, 3)
    free = views.nth(1)
    free.locator(".dk-facts", has_text="dist_async").wait_for()
    idle(page)  # a cell that ends takes the focus
    free.focus()
    page.keyboard.press("End")
    free.locator(".dkm-main .mark-version", has_text="v24").first.wait_for()
    sync.focus()
    page.keyboard.press("PageUp")
    for _ in range(4):
        page.keyboard.press("ArrowLeft")
    page.set_viewport_size({"width": 1280, "height": 3000})  # all of it, beside no toolbar
    look(page, {"lab-servers-sync": sync, "lab-servers-async": free})
    assert tab.errors == [] and tab.outside == []
