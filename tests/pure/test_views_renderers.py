"""The static renderer, the table, and the stored output of a timeline."""

import re
import xml.etree.ElementTree as ET
from unittest.mock import ANY

import pytest
import traces
from traces import (
    DEMOS,
    big,
    hang,
    odd_values,
    ring,
    stores,
)

from distkit._format import human_seconds
from distkit.events import Op
from distkit.trace.trace import Trace
from distkit.views.timeline.columns import Columns
from distkit.views.timeline.static import to_svg

TRACES = {
    **DEMOS,
    "odd": odd_values,
    "big": lambda: big(4000),
    "empty": Trace,
    "many ranks": lambda: big(600, n=100),
}
SVG = "{http://www.w3.org/2000/svg}"


def svg(trace):
    return ET.fromstring(to_svg(Columns(trace).picture(600)))


def texts(trace):
    return [text for element in svg(trace).iter(f"{SVG}text") for text in element.itertext()]


@pytest.mark.parametrize("name", TRACES)
def test_pictures_are_well_formed_and_small(name):
    picture = to_svg(Columns(TRACES[name]()).picture(600))
    assert ET.fromstring(picture).tag == f"{SVG}svg"
    assert len(picture.encode()) <= 60_000
    assert "<script" not in picture and " id=" not in picture and "<style" not in picture


def test_stopped_run_is_not_shown_as_running():
    trace = hang()
    words = texts(Trace(trace.events, traces.info(trace.info, interrupted=True)))
    assert "! the run was stopped" in words and "stopped in recv from rank 0" in words
    assert not any("still in" in word for word in words)


def test_hang_shows_the_call_of_each_rank():
    words = texts(hang())
    assert "still in all_reduce" in words and "still in recv from rank 0" in words
    assert "✕ send failed" in words and "! still in recv: rank 3" in words
    assert any("1,203 events dropped" in word for word in words)


def test_labels_are_drawn_where_they_have_space():
    script = traces.Script()
    for rank, end in enumerate((8, 90, 100, 30)):
        script.op(rank, Op.ALL_REDUCE, 0, end * traces.MS, nbytes=512)
        script.op(rank, Op.ALL_REDUCE, 0.1, 0.1 + end * traces.MS / 4, nbytes=512)
    script.op(0, Op.MARK, 0, 2.5 * traces.MS, attributes={"label": "warm up"})
    places = [
        (e.text or "", float(e.get("y")))
        for e in svg(script.trace(world_size=4)).iter(f"{SVG}text")
    ]
    names = {text: y for text, y in places if text.startswith("rank ")}
    labels = [(text, y) for text, y in places if text.startswith("all_reduce")]
    assert [text for text, _ in labels] == ["all_reduce 512 B"] * 2  # a collective is named once
    nearest = {min(names, key=lambda name: abs(names[name] - y)) for _, y in labels}
    assert (nearest, "warm up" in dict(places)) == ({"rank 1"}, True)  # rank 0 has less space


def test_arrows_are_above_the_bars():
    svg_text = to_svg(Columns(ring()).picture())
    shafts = [found.start() for found in re.finditer('stroke-width="1.6"', svg_text)]
    assert svg_text.rindex("<rect") < shafts[0] and shafts[-1] < svg_text.index("<polygon")


def test_store_call_is_named_as_in_the_program():
    words = texts(stores())
    assert {"store.get('ready')", "store"} <= set(words)
    assert "still in store.wait(['a', 'late'])" in words
    assert "! still in store.wait: rank 1" in words
    assert not any("store_" in word for word in words)


def test_long_trace_is_truncated_with_a_notice():
    found = texts(big(4000))
    assert (
        any(
            re.fullmatch(r"the first .* are drawn here: \d+ of 4,000 operations", word)
            for word in found
        )
        and found.count("rank 7") == 1
    )
    assert "the first 48 ranks are drawn here" in texts(big(600, n=100))
    assert not any("operations" in word for word in texts(ring()))


def test_labels_are_text_not_markup():
    words = texts(odd_values())
    assert "</script><img src=x onerror=alert(1)>" in words
    assert '<i>odd</i> & "ends"' in words


def test_empty_trace_has_a_notice():
    assert "nothing was recorded" in texts(Trace())


# -- the notebook --------------------------------------------------------------


def test_trace_is_displayed_as_a_timeline(monkeypatch):
    shown = []
    monkeypatch.setattr("IPython.display.display", lambda data, **_: shown.append(data))
    ring()._ipython_display_()
    snapshot, widget = shown
    assert set(snapshot) == {"text/html", "image/svg+xml", "text/plain"}
    assert widget == {"application/vnd.jupyter.widget-view+json": ANY, "text/html": ""}


# -- numbers ---------------------------------------------------------------------


def test_durations_are_formatted_at_unit_boundaries():
    assert [human_seconds(s) for s in (0, 9.9996e-4, 0.9994, 0.99999, 123.4)] == [
        "0 µs",
        "1 ms",
        "999 ms",
        "1 s",
        "123 s",
    ]
