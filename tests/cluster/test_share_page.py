"""The stand-alone page in a browser: every view of every run, by mouse and by keys."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import traces
from sheets import RESULTS, settle
from traces import MS, Script, ring, summary

import distkit as dk
from distkit.events import Op
from distkit.trace.trace import Trace
from distkit.views import to_html
from distkit.views.widget import assets
from distkit.views.widget.assets import css, esm


def watched() -> Trace:
    """Two steps of two ranks under ``watch_gradients``, with the messages of an all-reduce."""
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


def test_each_view_is_drawn_when_it_is_first_shown(tab: Any, page_file: Path) -> None:
    tab.page.goto(page_file.as_uri())
    tab.page.locator("#timeline0 canvas").first.wait_for()
    assert figures(tab) == 1
    places = tab.page.locator("[data-view]").evaluate_all("all => all.map(e => e.dataset.picture)")
    assert {"timeline0", "stage0", "tensors0", "servers1", "gradients2"} <= set(places)
    RESULTS.mkdir(exist_ok=True)
    for seen, place in enumerate(places, 1):
        name, run = re.fullmatch(r"(\w+)(\d)", place).groups()
        tab.page.click(f"#panel{run}tab")
        if name != "timeline":
            tab.page.click(f"#{place}tab")
        figure = tab.page.locator(f"#{place} figure.distkit-{name}").first
        figure.wait_for()
        settle(tab.page)
        assert figure.bounding_box()["height"] > 100
        assert tab.page.locator(f"#{place} .about").is_visible()
        assert figures(tab) == seen
        tab.page.screenshot(path=RESULTS / f"page-{place}.png")
    assert tab.errors == [] and tab.outside == []


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


# -- a picture of a newer distkit ----------------------------------------------------

NEWER = """<!DOCTYPE html><meta charset="utf-8"><style>%s</style><div id="at"></div>
<script type="module">%s
const model = {get: (k) => (k === "picture" ? %s : undefined), on: () => {}, off: () => {}};
window.dispose = view.render({model, el: document.getElementById("at")});
</script>"""


@pytest.mark.parametrize("name", ["scene", "timeline"])
def test_unknown_picture_version_has_a_notice(tab: Any, tmp_path: Path, name: str) -> None:
    script = esm(name).replace("export default", "const view =")
    picture = json.dumps({"format": assets.FORMAT + 1, "something": "else"})
    page = tmp_path / "newer.html"
    page.write_text(NEWER % (css(name), script, picture), encoding="utf-8")
    tab.page.goto(page.as_uri())
    message = tab.page.locator("#at").inner_text()
    newer = f"(format {assets.FORMAT + 1}, this page knows {assets.FORMAT})"
    assert (
        "drawn by a newer distkit" in message and newer in message and "update distkit" in message
    )
    tab.page.evaluate("dispose()")
    assert tab.page.locator("#at").inner_text() == ""
    assert tab.errors == []


@pytest.mark.parametrize("view", [dk.Timeline, dk.Stage, dk.Tensors, dk.Gradients])
def test_pictures_name_their_format(view: Any) -> None:
    assert view(ring()).get_state("picture")["picture"]["format"] == assets.FORMAT
