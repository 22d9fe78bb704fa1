"""The stand-alone page in a browser: every view of every run, with mouse and keyboard."""

import re
from pathlib import Path
from typing import Any

import pytest
import traces
from sheets import RESULTS, settle
from traces import MS, Script, ring, summary

from distkit.events import Op
from distkit.trace.trace import Trace
from distkit.views.widget.page import to_html


def watched() -> Trace:
    """Return two steps of two ranks under ``watch_gradients``, each with an all-reduce."""
    s = Script()
    for step in range(2):
        for rank in range(2):
            at = step * 10 * MS
            s.op(
                rank,
                Op.ALL_REDUCE,
                at,
                at + MS,
                shape=(4,),
                dtype="float32",
                nbytes=16,
                before=summary([1.0, 2.0, 3.0, rank]),
                after=summary([2.0, 4.0, 6.0, 1.0]),
            )
            s.op(
                rank,
                Op.MARK,
                at + MS,
                at + MS,
                attributes={"watched": "gradient", "name": "0.weight"},
                shape=(4,),
                dtype="float32",
                before=summary([1.0, 2.0, 3.0, rank]),
                after=summary([1.0, 2.0, 3.0, 0.5]),
            )
            s.op(
                rank,
                Op.MARK,
                at + 2 * MS,
                at + 2 * MS,
                attributes={"watched": "step"},
                after=summary([0.5 - 0.2 * step, 0.1, 8.0]),
            )
    return s.trace(name="watched", world_size=2)


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs = {"ring": ring(), "server": traces.parameter_server(), "watched": watched()}
    return to_html(runs, tmp_path_factory.mktemp("page") / "demo.html")


def figures(tab: Any) -> int:
    return int(tab.page.locator("[data-view] > figure").count())


def test_views_are_drawn_when_first_shown(tab: Any, page_file: Path) -> None:
    tab.page.goto(page_file.as_uri())
    tab.page.locator("#timeline0 canvas").first.wait_for()
    assert figures(tab) == 1
    panels = tab.page.locator("[data-view]").evaluate_all("all => all.map(e => e.dataset.picture)")
    assert {"timeline0", "stage0", "tensors0", "servers1", "gradients2"} <= set(panels)
    RESULTS.mkdir(exist_ok=True)
    for count, panel in enumerate(panels, 1):
        name, run = re.fullmatch(r"(\w+)(\d)", panel).groups()
        tab.page.click(f"#panel{run}tab")
        if name != "timeline":
            tab.page.click(f"#{panel}tab")
        figure = tab.page.locator(f"#{panel} figure.distkit-{name}").first
        figure.wait_for()
        settle(tab.page)
        assert figure.bounding_box()["height"] > 100
        assert tab.page.locator(f"#{panel} .about").is_visible()
        assert figures(tab) == count
        tab.page.screenshot(path=RESULTS / f"page-{panel}.png")
    assert tab.errors == [] and tab.external_requests == []


def test_tabs_are_keyboard_accessible(tab: Any, page_file: Path) -> None:
    tab.page.goto(page_file.as_uri())
    tab.page.locator("#timeline0 canvas").first.wait_for()
    tab.page.keyboard.press("Tab")
    assert tab.page.evaluate("document.activeElement.id") == "panel0tab"
    tab.page.keyboard.press("End")
    tab.page.keyboard.press("Tab")
    assert tab.page.evaluate("document.activeElement.id") == "timeline2tab"
    tab.page.keyboard.press("End")
    tab.page.locator("#gradients2 figure").first.wait_for()
    assert tab.errors == []
