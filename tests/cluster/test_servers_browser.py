"""The servers view in a browser, with traces of real workers and servers."""

import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import traces
from sheets import Sheet, settle
from waiting import until

import distkit as dk
from distkit import kvstore
from distkit.events import Op, State
from distkit.trace.trace import Trace
from distkit.views.scene.painter import body, keyframe_at
from distkit.views.scene.summaries import written
from distkit.views.scene.theme import theme
from distkit.views.servers.history import read
from distkit.views.servers.projection import project
from distkit.views.servers.scene import draw


def in_step() -> None:
    kv = kvstore.create("dist_sync", bigarray_bound=8)
    kv.init(["w", "b"], [torch.zeros(8), torch.zeros(2)])
    for _ in range(3):
        kv.push(["w", "b"], [torch.ones(8), torch.ones(2)])
        kv.pull(["w", "b"])


def out_of_step() -> None:
    """Worker 1 pulls, worker 0 updates three times, and only then worker 1 pushes."""
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


def left_alone() -> None:
    """Worker 1 registers but never pushes: worker 0 waits for it."""
    kv = kvstore.create("dist_sync")
    kv.init("w", torch.zeros(4))
    if kv.rank == 0:
        kv.push("w", torch.ones(4))
        kv.pull("w")
    threading.Event().wait(60)  # until it is interrupted


def interrupted(cluster: Any) -> Trace:
    """``left_alone``, interrupted when worker 0's pull has reached its server."""
    run, asked = cluster.submit(left_alone), threading.Event()

    def look(_: Any = None) -> None:
        pulls = [r for r in read(run.trace).requests if r.span.op is Op.PULL]
        if any(r.arrived is not None for r in pulls):
            asked.set()

    run.subscribe(look)
    look()
    assert asked.wait(60)
    until(lambda: any(s.state is State.BLOCKED for s in run.trace.spans if s.op is Op.PULL), 60)
    cluster.interrupt()
    with pytest.raises(dk.errors.RunInterrupted):
        run.wait()
    return run.trace


@pytest.fixture(scope="module")
def real() -> dict[str, Trace]:
    with dk.Cluster(workers=2, servers=2) as cluster:
        found = {f.__name__: cluster.run(f).trace for f in (in_step, out_of_step)}
        return {**found, "left_alone": interrupted(cluster)}


def sheet(tab: Any, folder: Path, trace: Trace, **media: Any) -> Sheet:
    """The view on a page, with reduced motion."""
    tab.page.emulate_media(**{"reduced_motion": "reduce", **media})
    return Sheet(tab, dk.Servers(trace), folder / "servers.html")


def drawn(on: Sheet, selector: str) -> list[str]:
    """Return the text of a part of the scene."""
    return list(on.root.locator(selector).all_text_contents())


def seek(on: Sheet, part: float) -> None:
    on.drawn(lambda: on.root.locator(".dk-scrub").fill(str(int(2000 * part))))


def test_synchronous_run_is_stepped_through(tab: Any, real: Any, tmp_path: Path) -> None:
    view = sheet(tab, tmp_path, real["in_step"])
    assert "dist_sync" in view.text(".dk-facts")
    assert "one gradient of each of the 2 workers" in view.text(".dk-said")
    named = drawn(view, ".dkm-main .mark-name")
    assert sorted(named) == ["scheduler", "server 0", "server 1", "worker 0", "worker 1"]
    assert sorted(drawn(view, ".mark-key")) == ["b", "w", "w"]  # each server has a part of w
    view.root.focus()
    tab.page.keyboard.press("Home")
    tab.page.wait_for_selector(".distkit-servers[data-keyframe='-1']")
    assert drawn(view, ".dkm-main .mark-small").count("no value yet") == 3
    assert view.root.locator(".dkm-list [aria-current]").count() == 0
    view.press("ArrowRight")
    assert "registers with the scheduler" in view.text(".dk-fact")
    message = re.search(r"(\d of 4) have registered", view.text(".dk-fact"))
    assert message is not None and f"{message[1]} registered" in drawn(view, ".mark-words")
    view.press("PageDown")
    assert "updates" in view.text(".dk-fact strong") and "to v1" in view.text(".dk-fact strong")
    assert "with worker 0 + worker 1" in view.text(".dk-fact")
    assert drawn(view, ".mark-reversed") == ["v1"]
    row = view.root.locator(".dkm-list [aria-current=step]")
    assert row.locator(".dkm-who").all_inner_texts() == ["0", "1"]
    view.press("End")
    assert drawn(view, ".dkm-main .mark-version") == ["v3"] * 3
    assert drawn(view, ".mark-figure")[0] == "18"  # three parts, three steps, two workers
    assert tab.page.evaluate("leaked") == []  # no key reaches the notebook
    spoken = view.root.locator("> .dk-spoken").text_content()
    assert view.text(".dk-fact strong") in spoken
    view.fine()


def test_stale_gradient_is_marked_everywhere(tab: Any, real: Any, tmp_path: Path) -> None:
    view = sheet(tab, tmp_path, real["out_of_step"])
    assert "to v4" in view.text(".dk-fact strong")  # it opens at the most stale gradient
    assert drawn(view, ".dkm-main .mark-late") == ["3 late"]
    assert view.texts(".dkm-list li .dkm-who")[-1].split() == ["1", "3", "late"]
    assert drawn(view, ".mark-count") == ["3", "1"]
    assert drawn(view, ".mark-tick") == ["0", "1", "2", "3"]
    view.root.focus()
    message = []
    # other messages may come in between
    while not any("computed from v0" in fact for fact in message):
        view.press("ArrowLeft")
        message.append(view.text(".dk-fact"))
        assert len(message) < 6, message
    view.root.locator(".dkm-list li").first.click()
    view.root.locator(".dkm-main .mark-version", has_text="v1").wait_for()
    view.fine()


def test_few_values_are_shown_as_numbers(tab: Any, real: Any, tmp_path: Path) -> None:
    """The recorder omits values beyond its time budget; the others must be correct."""
    made = {u.place: u.value for u in read(real["in_step"]).updates}  # the last of each
    known = [(key, written(value)) for (_, key), value in made.items() if value is not None]
    assert {reported for _, reported in known} <= {"[2, 2, 2, 2]", "[2, 2]"}  # 1 of each worker
    view = sheet(tab, tmp_path, real["in_step"])
    view.root.focus()
    view.press("End")
    assert sorted(drawn(view, ".mark-worth")) == sorted(reported for _, reported in known)
    titles = drawn(view, ".dkm-main title")
    for key, reported in known:
        assert titles.count(f"{key} v3 = {reported}") == known.count((key, reported))
    view.fine()


def test_waiting_workers_are_shown(tab: Any, real: Any, tmp_path: Path) -> None:
    view = sheet(tab, tmp_path, real["left_alone"])
    assert "1 pull never answered" in view.text(".dk-notices")
    assert "waits for the gradient of worker 1" in view.text(".dk-fact")
    assert drawn(view, ".mark-strong") == ["waits for worker 1"]
    assert view.root.locator(".dkm-main .mark-waiting").count() == 1
    assert view.root.locator(".mark-arc").count() == 1
    assert view.root.locator(".dkm-main .mark-held").count() == 1
    assert "worker 0 waits for worker 1" in view.root.locator("> .dk-spoken").text_content()
    view.fine()


def test_view_plays_pauses_and_ends(tab: Any, real: Any, tmp_path: Path) -> None:
    view = sheet(tab, tmp_path, real["in_step"], reduced_motion="no-preference")
    view.root.focus()
    tab.page.keyboard.press("Home")
    tab.page.wait_for_selector(".distkit-servers[data-keyframe='-1']")
    tab.page.keyboard.press("Space")
    tab.page.wait_for_selector(".dkm-moving", state="attached")
    token = tab.page.locator(".dkm-moving").first
    assert token.get_attribute("transform")
    tab.page.keyboard.press("Space")
    assert view.root.get_attribute("data-playing") == "false"
    paused = view.text(".dk-clock")
    settle(tab.page)
    assert view.text(".dk-clock") == paused
    tab.page.select_option(".dk-speed", "16")
    tab.page.click(".dk-play")
    tab.page.wait_for_selector(".distkit-servers[data-playing=true]")
    tab.page.wait_for_selector(".distkit-servers[data-playing=false]")
    assert drawn(view, ".dkm-main .mark-version") == ["v3"] * 3
    assert view.root.locator(".dkm-moving").count() == 0
    view.fine()


def test_updates_of_one_key_are_shown(tab: Any, real: Any, tmp_path: Path) -> None:
    view = sheet(tab, tmp_path, real["in_step"])
    tab.page.select_option(".dkm-list select", "b")
    rows = view.texts(".dkm-list .dk-who")
    assert [row.split() for row in rows] == [["b", "v1"], ["b", "v2"], ["b", "v3"]]
    seek(view, 1.0)
    assert view.text(".dkm-list [aria-current=step] .dk-who").split() == ["b", "v3"]
    view.fine()


def test_view_grows_during_the_run(tab: Any, real: Any, tmp_path: Path) -> None:
    whole = real["in_step"]
    early = Trace(whole[: len(whole) // 2], whole.info)
    view = dk.Servers(early)
    view._data = draw(project(early, live=True))
    tab.page.emulate_media(reduced_motion="reduce")
    page = Sheet(tab, view, tmp_path / "servers.html")
    assert page.text(".dk-live") == "live"
    page.renew(whole)
    assert page.root.locator(".dk-live").count() == 0
    assert drawn(page, ".mark-figure")[0] == "18"  # the view followed to the end
    page.fine()


@pytest.mark.parametrize("make", [Trace, traces.hang, traces.odd_values, traces.parameter_server])
def test_unusual_traces_are_drawn(tab: Any, make: Any, tmp_path: Path) -> None:
    view = sheet(tab, tmp_path, make())
    view.root.focus()
    for key in ("ArrowRight", "PageDown", "End", "ArrowRight", "Home", "PageUp", "Space", "Space"):
        tab.page.keyboard.press(key)
    if make is traces.parameter_server:
        assert view.root.locator(".mark-number, .mark-hollow").count() == 2
    else:
        assert view.text(".dkv-empty") == "this trace has no requests to a parameter server"
    view.fine()


def test_hundred_workers_are_drawn(tab: Any, tmp_path: Path) -> None:
    s = traces.Script()
    for worker in range(100):
        message = {
            "attributes": {"key": "w"},
            "match": f"kv:0:{worker}:0",
            "nbytes": 8,
            "dtype": "float32",
        }
        s.op(worker, Op.PUSH, worker * 1e-3, None, peer=100 + worker % 9, **message)
        s.op(100 + worker % 9, Op.RECV, worker * 1e-3, worker * 1e-3 + 5e-4, peer=worker, **message)
    roles = traces.names(*["worker"] * 100, *["server"] * 9)
    view = sheet(tab, tmp_path, s.trace(ranks=roles))
    assert view.root.locator(".mark-number").count() == 10
    assert "the first 10 of 100 workers are drawn" in view.text(".dk-notices")
    view.root.focus()
    view.press("End", "ArrowLeft")
    view.fine()


def test_both_painters_agree(tab: Any, real: Any, tmp_path: Path) -> None:
    """Shapes and text of the initial moment."""
    for trace in real.values():
        view = sheet(tab, tmp_path, trace)
        scene, time = view.view._data["scene"], view.view._data["opening"]
        svg = body(scene, time, keyframe_at(view.view._data, time))
        for tag in ("rect", "circle", "path", "text", "title"):
            assert view.root.locator(f".dkm-main {tag}").count() == svg.count(f"<{tag}")
        words = view.root.locator(".dkm-main text").all_text_contents()
        assert sorted(words) == sorted(re.findall(r"<text[^>]*>([^<]*)</text>", svg))


def test_pictures_are_saved(tab: Any, real: Any, tmp_path: Path) -> None:
    for name in ("in_step", "out_of_step"):
        view = sheet(tab, tmp_path, real[name])
        light = view.root.evaluate("e => getComputedStyle(e).backgroundColor")
        view.pictures(f"servers-{name.replace('_', '-')}")
        assert view.root.evaluate("e => getComputedStyle(e).backgroundColor") != light
        assert view.root.evaluate("e => e.scrollWidth <= e.clientWidth")
        tab.page.set_viewport_size({"width": 1280, "height": 720})
        view.root.locator(".dk-clock").wait_for()
        assert view.root.bounding_box()["height"] <= 640  # it fits a projector
        first = view.root.evaluate("r => getComputedStyle(r).getPropertyValue('--dk-r0')")
        assert first == theme()["dark"]["ranks"][0]
        tab.page.emulate_media(color_scheme="light")
        view.fine()
