"""A kernel is interrupted and restarted in a real JupyterLab, in every state, widgets open."""

from __future__ import annotations

import json
from typing import Any

import psutil
import pytest
from labs import run_cell

from benchmarks.lab import IDLE, command
from benchmarks.step import notebook

SETUP = """
import json, psutil, threading
import torch, torch.distributed as dist
import distkit as dk

cluster = dk.Cluster(2)
run = cluster.run(dist.barrier)
print('pids', json.dumps([p.pid for p in psutil.Process().children(recursive=True)]))
run
"""
#: How each state is reached, and what one sees then.
STATES = {
    "starting": (
        "late = dk.Cluster(2).wait()\nlate._room.ready = threading.Event()\nprint('now')\n"
        "late.run(dist.get_rank)",
        ".jp-OutputArea-output:has-text('now')",
    ),
    "running": (
        "def endless():\n    while True:\n        dist.all_reduce(torch.ones(1))\n\n"
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


@pytest.mark.parametrize(
    ("state", "how"),
    [
        ("starting", "interrupt"),
        ("running", "interrupt"),
        ("running", "restart"),
        ("stepping", "restart"),
    ],
)
def test_a_kernel_goes_on(lab: Any, tab: Any, state: str, how: str) -> None:
    page, (program, seen) = tab.page, STATES[state]
    name = f"kernel-{state}-{how}.ipynb"
    (lab.root / name).write_text(notebook(SETUP, program, AFTER, STOP))
    page.goto(lab.address(name))
    page.wait_for_function(IDLE, timeout=60_000)
    run_cell(page, 0)
    text = page.locator(".jp-OutputArea-output", has_text="pids").inner_text()
    started = [psutil.Process(pid) for pid in json.loads(text.partition("pids ")[2])]
    page.evaluate(
        """() => {
        jupyterapp.shell.currentWidget.content.activeCellIndex = 1;
        jupyterapp.commands.execute("notebook:run-cell");  // not waited for
    }"""
    )
    page.wait_for_selector(seen, timeout=60_000)
    if how == "interrupt":
        command(page, "notebook:interrupt-kernel")
        page.wait_for_function(IDLE, timeout=60_000)
        said = "\n".join(page.locator(".jp-OutputArea-output").all_inner_texts())
        assert "Traceback" not in said, said
    else:
        page.evaluate(
            "() => jupyterapp.shell.currentWidget.sessionContext.session.kernel.restart()"
        )
        page.wait_for_function(IDLE, timeout=60_000)
        _, alive = psutil.wait_procs(started, timeout=20)
        assert alive == []
        run_cell(page, 0)
    run_cell(page, 2)
    page.locator(".jp-OutputArea-output", has_text="after [0, 1]").wait_for()
    run_cell(page, 3)
    assert tab.outside == []
