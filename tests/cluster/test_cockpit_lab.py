"""The cockpit of real ranks in JupyterLab, with mouse and keyboard."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from labs import change_theme, open_notebook, outputs, run_cell, save_screenshots

START = """
import torch, torch.distributed as dist
import distkit as dk

cluster = dk.Cluster(4)
"""
STEP = """
def ring_sum():
    rank, n = dist.get_rank(), dist.get_world_size()
    passing = torch.linspace(-1, 1, 24) * (rank + 1)
    total = passing.clone()
    for _ in range(n - 1):
        received = torch.zeros_like(total)
        work = dist.isend(passing, dst=(rank + 1) % n)
        dist.recv(received, src=(rank - 1) % n)
        work.wait()
        total += received
        passing = received
    return total[-1].item()

stepper = cluster.step(ring_sum)
stepper
"""
RESULT = "print('result', stepper.finish().results)"
DEADLOCK = """
def cross():
    other = dist.get_rank() ^ 1
    dist.recv(torch.zeros(1), src=other)
    dist.send(torch.zeros(1), dst=other)

cluster.run(cross)
"""
AFTER = "print('after', cluster.run(dist.get_rank).results)"


@pytest.fixture
def page(lab: Any, tab: Any) -> Iterator[Any]:
    """A notebook whose first two cells have run and show the cockpit."""
    cells = START, STEP, RESULT, DEADLOCK, AFTER, "cluster.stop()"
    page = tab.page
    open_notebook(lab, page, "cockpit.ipynb", *cells)
    for cell in (0, 1):
        run_cell(page, cell)
    page.wait_for_selector('.distkit-cockpit[data-cockpit="ready"][data-position="0"]')
    yield page
    run_cell(page, 5)
    assert tab.errors == []
    assert tab.external_requests == []


def wait_for_position(page: Any, position: int, state: str = "now") -> None:
    page.wait_for_selector(f'.distkit-cockpit[data-position="{position}"][data-state="{state}"]')


def statuses(page: Any) -> list[str]:
    return [c.get_attribute("data-status") for c in page.locator(".dk-card").all()]


def test_cockpit_works_in_jupyterlab(page: Any) -> None:
    number_of_cells = page.locator(".jp-Cell").count()
    active = "jupyterapp.shell.currentWidget.content.activeCellIndex"
    page.evaluate(f"() => {{ {active} = 2; }}")
    page.locator(".dk-next").click()
    wait_for_position(page, 1)
    assert page.evaluate(f"() => {active}") == 2  # Shift+Enter runs the selected cell
    assert statuses(page) == ["paused"] * 4
    page.locator('.dk-go[data-rank="2"]').click()  # rank 2 receives what rank 1 has sent
    wait_for_position(page, 2)
    lines = page.locator(".dk-window .dk-pin").evaluate_all(
        "pins => pins.map(p => [p.dataset.rank, p.dataset.line])"
    )
    # rank 2 is in work.wait(), because rank 3 has not yet received
    assert sorted(lines) == [["0", "8"], ["1", "8"], ["2", "9"], ["3", "8"]]
    assert statuses(page)[2] == "blocked"  # in its send, until rank 3 receives
    save_screenshots(page, {"stepping": page, "stepping-cockpit": page.locator(".distkit-cockpit")})

    page.locator(".distkit-cockpit").focus()
    page.keyboard.press("b")
    wait_for_position(page, 1, "past")
    page.keyboard.press("Home")
    wait_for_position(page, 0, "past")
    page.keyboard.press("ArrowRight")
    wait_for_position(page, 1, "past")
    page.keyboard.press("End")
    wait_for_position(page, 2)
    page.keyboard.press("3")  # unblocks rank 2
    wait_for_position(page, 3)
    assert statuses(page)[2:] == ["paused", "blocked"]

    page.locator("select.dk-speed").select_option(index=2)
    page.locator(".dk-play").click()
    page.wait_for_selector('.distkit-cockpit[data-state="playing"]')
    page.wait_for_selector('.distkit-cockpit[data-state="finished"]')
    assert statuses(page) == ["finished"] * 4
    assert page.locator(".jp-Cell").count() == number_of_cells  # no key reached JupyterLab

    for cell in (2, 3, 4):
        run_cell(page, cell)
    outputs(page, "result [10.0, 10.0, 10.0, 10.0]")
    outputs(page, "each waits for the other. Let one of them send first")
    message = outputs(page, "after [0, 1, 2, 3]")
    assert not any("site-packages" in text or "distkit/cluster" in text for text in message)
    page.locator(".jp-Cell").nth(4).scroll_into_view_if_needed()
    change_theme(page, "Dark")
    save_screenshots(
        page, {"deadlock-dark": page, "finished-dark": page.locator(".distkit-cockpit")}
    )
