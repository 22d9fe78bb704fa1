"""The standalone page: one file without external resources, safe with hostile labels."""

import base64
import json
import re
import zlib
from html.parser import HTMLParser

from hypothesis import given, settings
from hypothesis import strategies as st
from traces import DEMOS, MS, Script, big, odd_values, ping_pong, ring, summary

from benchmarks.views import long_trace
from distkit.events import Op
from distkit.trace.trace import Trace
from distkit.views.widget import page as page_module
from distkit.views.widget.page import _json, to_html


class Page(HTMLParser):
    """Parses a page: elements, scripts and visible text."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.scripts, self.visible_text = [], [], {}, ""
        self._in = None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        self._in = (tag, dict(attrs).get("id") or dict(attrs).get("type"))

    def handle_data(self, data):
        if self._in and self._in[0] == "script":
            self.scripts[self._in[1]] = self.scripts.get(self._in[1], "") + data
        else:
            self.visible_text += data

    @property
    def data(self):
        return json.loads(self.scripts["pictures"])

    def picture(self, view="timeline", run=0):
        return json.loads(zlib.decompress(base64.b64decode(self.data[f"{view}{run}"]["json"])))

    def length(self, name):
        """Return the length of one of the timeline's arrays."""
        return {part: n for part, _, n in self.picture()["columns"]["parts"]}[name]

    @property
    def views(self):
        """The names of the views, each followed by the index of its run."""
        return [id for key, id in self.attributes if key == "data-picture"]


def page(trace, tmp_path):
    return Page(to_html(trace, tmp_path / "run.html").read_text(encoding="utf-8"))


def test_page_of_one_trace_has_a_tab_per_view(tmp_path):
    found = page(ring(), tmp_path)
    assert ("aria-label", "runs") not in found.attributes
    assert found.views == ["timeline0", "stage0", "tensors0"] == list(found.data)
    assert found.attributes.count(("role", "tab")) == found.attributes.count(("role", "tabpanel"))
    assert found.length("send") == 24
    assert len(found.picture("stage")["keyframes"]) == 6  # rounds
    assert len(found.picture("tensors")["keyframes"]) == 24


def test_page_of_several_traces_has_nested_tabs(tmp_path):
    found = page({name: make() for name, make in DEMOS.items()}, tmp_path)
    lists = found.attributes.count(("role", "tablist"))
    assert ("aria-label", "runs") in found.attributes and lists <= 1 + len(DEMOS)
    assert found.attributes.count(("role", "tab")) == found.attributes.count(("role", "tabpanel"))
    assert found.attributes.count(("aria-selected", "true")) == lists
    assert found.picture(run=1)["title"] == "ring all-reduce"


def test_page_opens_with_its_title_a_sentence_and_a_chosen_view(tmp_path):
    options = {"title": "Messages <1>", "about": {"a": "2 < 3"}, "first": ["servers", "stage"]}
    text = to_html({"a": ping_pong(), "b": Trace()}, tmp_path / "run.html", **options).read_text()
    assert "Messages <1>" in Page(text).visible_text and "2 < 3" in Page(text).visible_text
    assert Page(text).views == ["stage0", "timeline0", "tensors0", "timeline1"]
    assert '<div id="timeline0" role="tabpanel" aria-labelledby="timeline0tab" hidden>' in text


def watched_trace():
    s = Script()
    for rank in range(2):
        s.op(
            rank,
            Op.MARK,
            0,
            MS,
            attributes={"watched": "gradient", "name": "w"},
            shape=(2,),
            dtype="float32",
            before=summary([1.0, 2.0]),
            after=summary([2.0, 3.0]),
        )
        s.op(rank, Op.MARK, MS, MS, attributes={"watched": "step"}, after=summary([0.5, 0.1, 8.0]))
    return s.trace(world_size=2)


def test_page_shows_the_views_that_apply(tmp_path):
    alone = Script().op(0, Op.MARK, 0, MS, attributes={"label": "work"}).trace(world_size=1)
    silent = Script().op(0, Op.BARRIER, 0, MS).op(1, Op.BARRIER, 0, MS).trace(world_size=2)
    for trace, views in (
        (Trace(), ["timeline0"]),
        (alone, ["timeline0"]),
        (silent, ["timeline0", "stage0"]),
        (watched_trace(), ["timeline0", "gradients0"]),
    ):
        assert page(trace, tmp_path).views == views
    assert ("role", "tab") not in page(alone, tmp_path).attributes


def test_page_of_a_long_run_is_small(tmp_path):
    path = to_html(long_trace(100_000), tmp_path / "long.html")
    assert path.stat().st_size < 2_000_000
    assert Page(path.read_text()).views == ["timeline0", "stage0"]


def test_long_run_is_truncated_with_a_notice(tmp_path, monkeypatch):
    assert page(big(5600), tmp_path).picture()["notices"] == []
    monkeypatch.setattr(page_module, "MAX_OPERATIONS", 1000)
    monkeypatch.setattr(page_module, "MAX_EVENTS", 5000)
    found = page(big(5600), tmp_path)
    assert (
        found.views == ["timeline0"] and "this page shows only its timeline" in found.visible_text
    )
    (notice,) = [n for n in found.picture()["notices"] if "drawn" in n]
    assert notice.startswith("the first 1,000 of ") and found.length("start") == 1000


def test_page_loads_no_external_resource(tmp_path):
    text = to_html(ping_pong(), tmp_path / "run.html").read_text(encoding="utf-8")
    addresses = set(re.findall(r"https?://[^\s\"'<)]+", text)) - {"https://d3js.org"}
    # XML namespaces are not loaded
    assert not {a for a in addresses if not a.startswith("http://www.w3.org/")}
    assert not re.search(r"<(script|link|img|iframe)[^>]+(src|href)=[\"'](?!data:,)", text)
    assert "@import" not in text
    assert not re.search(r"\bimport\b", Page(text).scripts["module"])


def test_hostile_labels_stay_text(tmp_path):
    found = page({"</script><b>": odd_values(), "x": ring()}, tmp_path)
    assert "b" not in found.tags and "img" not in found.tags
    categories = found.picture()["columns"]["categories"]
    marks = [category["label"] for category in categories if category["kind"] == "mark"]
    assert marks == ["</script><img src=x onerror=alert(1)>"]


@settings(deadline=None)
@given(st.text(max_size=30))
def test_data_cannot_end_its_script(label):
    text = _json({"label": label, "end": "</script><!--"})
    assert "<" not in text and ">" not in text and text.isascii()
    assert json.loads(text)["label"] == label


@settings(deadline=None)
@given(st.text(max_size=30).map(lambda s: f"<{s}>"))
def test_labels_do_not_change_the_elements(tmp_path_factory, label):
    folder = tmp_path_factory.getbasetemp()
    plain = Script().op(0, Op.SEND, 0, MS, peer=1, attributes={"key": "w"}).trace(name="run")
    unusual = Script().op(0, Op.SEND, 0, MS, peer=1, attributes={"label": label}).trace(name=label)
    assert page(unusual, folder).tags == page(plain, folder).tags
