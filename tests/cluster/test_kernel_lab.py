"""Interrupt and restart of a kernel in JupyterLab, with open widgets."""

from __future__ import annotations

from typing import Any

import psutil
import pytest
from labs import idle, open_notebook, run_cell, save_screenshots
from waiting import wait_until

from benchmarks.lab import command

SETUP = """
import os, time
import torch, torch.distributed as dist
import distkit as dk

cluster = dk.Cluster(2)
run = cluster.run(dist.barrier)
print('kernel-pid', os.getpid())
run
"""
#: The code that reaches each state, and the element that then appears.
STATES = {
    "running": (
        "def endless():\n    while True:\n        dist.all_reduce(torch.ones(1))\n"
        "        time.sleep(0.01)  # gives the browser time\n\n"
        "cluster.run(endless)",
        ".dk-live",
    ),
    "stepping": (
        "stepper = cluster.step(lambda: [dist.barrier() for _ in range(3)])\nstepper",
        '.distkit-cockpit[data-cockpit="ready"]',
    ),
}
AFTER = "cluster.interrupt()\nprint('after', cluster.run(dist.get_rank).results)"
STOP = "cluster.stop()"


@pytest.mark.parametrize(("state", "action"), [("running", "interrupt"), ("stepping", "restart")])
def test_kernel_can_be_interrupted_and_restarted_with_open_widgets(
    lab: Any, tab: Any, state: str, action: str
) -> None:
    page, (program, selector) = tab.page, STATES[state]
    open_notebook(lab, page, f"kernel-{state}-{action}.ipynb", SETUP, program, AFTER, STOP)
    run_cell(page, 0)
    text = page.locator(".jp-OutputArea-output", has_text="kernel-pid").inner_text()
    kernel = psutil.Process(int(text.partition("kernel-pid")[2]))
    page.evaluate(
        """() => {
        jupyterapp.shell.currentWidget.content.activeCellIndex = 1;
        jupyterapp.commands.execute("notebook:run-cell");  // not awaited
    }"""
    )
    page.wait_for_selector(selector)
    started = kernel.children(recursive=True)
    if action == "interrupt":
        command(page, "notebook:interrupt-kernel")
        idle(page)
        message = "\n".join(page.locator(".jp-OutputArea-output").all_inner_texts())
        assert "Traceback" not in message, message
    else:
        page.evaluate(
            "() => jupyterapp.shell.currentWidget.sessionContext.session.kernel.restart()"
        )
        idle(page)
        _, alive = psutil.wait_procs(started, timeout=20)
        assert alive == []
        run_cell(page, 0)
    run_cell(page, 2)
    page.locator(".jp-OutputArea-output", has_text="after [0, 1]").wait_for()
    run_cell(page, 3)
    assert tab.external_requests == []


NOTICE = "the kernel has stopped"


def test_outputs_have_a_notice_after_the_kernel_dies(lab: Any, tab: Any) -> None:
    page, name = tab.page, "ended.ipynb"
    live = "live = cluster.submit(dist.recv, torch.zeros(1), wait_forever=True)\nlive"
    crash = "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)"
    open_notebook(lab, page, name, SETUP, live, "cluster", crash)
    for cell in (0, 1, 2):
        run_cell(page, cell)
    cards, views = page.locator(".distkit-card"), page.locator(".distkit-timeline")
    cards.nth(1).locator("li", has_text="rank 1").wait_for()
    cards.locator("b", has_text="running").nth(1).wait_for()
    assert page.locator(".dk-ended").count() == 0
    page.evaluate("() => { jupyterapp.shell.currentWidget.content.activeCellIndex = 3; }")
    command(page, "notebook:run-cell")
    views.nth(0).locator(".dk-ended", has_text=NOTICE).wait_for()  # of the finished run
    views.nth(1).locator(".dk-live, .dk-ended", has_text=NOTICE).wait_for()
    save_screenshots(page, {"ended": page})

    command(page, "docmanager:save")
    page.goto(lab.address(name))  # the widgets no longer exist, so their static pictures are shown
    wait_until(lambda: page.locator(".distkit-still:visible").count() == 2, timeout=60)
    wait_until(lambda: page.locator(".distkit-ended:visible").count() == 1, timeout=60)
    save_screenshots(page, {"ended-again": page})
    assert tab.external_requests == []
