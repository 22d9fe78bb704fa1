"""The servers view in a browser, with traces of real workers and servers."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from sheets import Sheet

import distkit as dk
from distkit import kvstore
from distkit.trace.trace import Trace
from distkit.views.scene.renderer import body, keyframe_at
from distkit.views.servers.scene import draw


def push_in_step() -> None:
    kv = kvstore.create("dist_sync", bigarray_bound=8)
    kv.init(["w", "b"], [torch.zeros(8), torch.zeros(2)])
    for _ in range(3):
        kv.push(["w", "b"], [torch.ones(8), torch.ones(2)])
        kv.pull(["w", "b"])


def push_out_of_step() -> None:
    """Push three times on worker 0 between worker 1's pull and its push."""
    kv = kvstore.create("dist_async")
    kv.init("w", torch.zeros(4))
    kv.set_optimizer(kvstore.SGD(learning_rate=0.1))
    kv.pull("w")
    kv.barrier()
    for _ in range(3 * (kv.rank == 0)):
        kv.push("w", torch.ones(4))
        kv.pull("w")
    kv.barrier()
    if kv.rank == 1:
        kv.push("w", torch.ones(4))


@pytest.fixture(scope="module")
def traces() -> dict[str, Trace]:
    with dk.Cluster(workers=2, servers=2) as cluster:
        return {f.__name__: cluster.run(f).trace for f in (push_in_step, push_out_of_step)}


def open_page(tab: Any, folder: Path, trace: Trace, **media: Any) -> Sheet:
    """Show a trace on a page, with reduced motion."""
    tab.page.emulate_media(**{"reduced_motion": "reduce", **media})
    return Sheet(tab, dk.Servers(trace), folder / "servers.html")


def texts_of(page: Sheet, selector: str) -> list[str]:
    """Return the texts of the elements that match the selector."""
    return list(page.root.locator(selector).all_text_contents())


def test_keyboard_steps_through_a_synchronous_run(tab: Any, traces: Any, tmp_path: Path) -> None:
    view = open_page(tab, tmp_path, traces["push_in_step"])
    assert "dist_sync" in view.text(".dk-facts")
    assert "one gradient from each of the 2 workers" in view.text(".dk-description")
    named = texts_of(view, ".dkm-main .mark-name")
    assert sorted(named) == ["scheduler", "server 0", "server 1", "worker 0", "worker 1"]
    assert sorted(texts_of(view, ".mark-key")) == ["b", "w", "w"]  # each server has a part of w
    view.root.focus()
    tab.page.keyboard.press("Home")
    tab.page.wait_for_selector(".distkit-servers[data-keyframe='-1']")
    assert texts_of(view, ".dkm-main .mark-small").count("no value yet") == 3
    assert view.text(".dk-fact") == "the last node registers"
    assert view.root.locator(".dkm-list [aria-current]").count() == 0
    view.press("ArrowRight")
    assert "registers with the scheduler" in view.text(".dk-fact")
    view.press("PageDown")
    assert "updates" in view.text(".dk-fact strong") and "to v1" in view.text(".dk-fact strong")
    assert "with worker 0 + worker 1" in view.text(".dk-fact")
    view.press("End")
    assert texts_of(view, ".dkm-main .mark-version") == ["v3"] * 3
    assert texts_of(view, ".mark-figure")[0] == "18"  # three parts, three steps, two workers
    assert tab.page.evaluate("leaked") == []  # no key reaches the notebook
    assert view.text(".dk-fact strong") in view.root.locator("> .dk-spoken").text_content()
    view.save_screenshots("servers-in-step")
    assert view.root.evaluate("e => e.scrollWidth <= e.clientWidth")
    view.assert_clean()


def test_view_grows_during_the_run(tab: Any, traces: Any, tmp_path: Path) -> None:
    whole = traces["push_in_step"]
    early = Trace(whole[: len(whole) // 2], whole.info)
    view = dk.Servers(early)
    view._data = draw(early, live=True)
    tab.page.emulate_media(reduced_motion="reduce")
    page = Sheet(tab, view, tmp_path / "servers.html")
    assert page.text(".dk-live") == "live"
    page.refresh(whole)
    assert page.root.locator(".dk-live").count() == 0
    assert texts_of(page, ".mark-figure")[0] == "18"  # the view follows the run to its end
    page.assert_clean()


def test_javascript_and_svg_renderers_draw_the_same_shapes(
    tab: Any, traces: Any, tmp_path: Path
) -> None:
    """Compares the numbers of shapes, and the texts, at the initial moment."""
    for trace in traces.values():
        view = open_page(tab, tmp_path, trace)
        scene, time = view.view._data["scene"], view.view._data["opening"]
        svg = body(scene, time, keyframe_at(view.view._data, time))
        for tag in ("rect", "circle", "path", "text", "title"):
            assert view.root.locator(f".dkm-main {tag}").count() == svg.count(f"<{tag}")
        words = view.root.locator(".dkm-main text").all_text_contents()
        assert sorted(words) == sorted(re.findall(r"<text[^>]*>([^<]*)</text>", svg))
