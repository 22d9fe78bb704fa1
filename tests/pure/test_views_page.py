"""The stand-alone page: one file, safe with hostile labels, nothing loaded from elsewhere."""

import base64
import json
import re
import zlib
from html.parser import HTMLParser

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from traces import DEMOS, MS, Script, big, odd_values, ping_pong, ring

from distkit.events import Op, Trace
from distkit.views import to_html
from distkit.views.assets import css, esm
from distkit.views.page import _json


class Page(HTMLParser):
    """The elements of a page, the text of its scripts, and the text that a reader sees."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.scripts, self.seen = [], [], {}, ""
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
            self.seen += data

    @property
    def pictures(self):
        return json.loads(self.scripts["pictures"])

    def column(self, name, run=0):
        """One of the arrays of a picture."""
        columns = self.pictures[run]["columns"]
        data = zlib.decompress(base64.b64decode(columns["bytes"]))
        at = 0
        for part, kind, length in columns["parts"]:
            size = length * int(kind[1])
            if part == name:
                return np.frombuffer(data[at : at + size], f"<{kind}")
            at += size
        raise KeyError(name)


def page(trace, tmp_path):
    return Page(to_html(trace, tmp_path / "run.html").read_text(encoding="utf-8"))


def test_one_trace_makes_a_page_without_tabs(tmp_path):
    found = page(ring(), tmp_path)
    assert ("role", "tab") not in found.attributes
    assert len(found.pictures) == 1 and len(found.column("send")) == 24
    assert "collectives.py:31" in found.seen and "rank 3 → rank 0" in found.seen


def test_several_traces_are_tabs(tmp_path):
    found = page({name: make() for name, make in DEMOS.items()}, tmp_path)
    assert found.attributes.count(("role", "tab")) == len(DEMOS)
    assert found.attributes.count(("role", "tabpanel")) == len(DEMOS)
    assert found.attributes.count(("aria-selected", "true")) == 1
    assert [p["title"] for p in found.pictures][1] == "ring all-reduce"


def test_a_page_loads_nothing(tmp_path):
    text = to_html(ping_pong(), tmp_path / "run.html").read_text(encoding="utf-8")
    addresses = set(re.findall(r"https?://[^\s\"'<)]+", text)) - {"https://d3js.org"}
    assert not {a for a in addresses if not a.startswith("http://www.w3.org/")}  # names, not loaded
    assert not re.search(r"<(script|link|img|iframe)[^>]+(src|href)=[\"'](?!data:,)", text)
    assert "@import" not in text and "import(" not in text


def test_a_page_tells_about_the_run(tmp_path):
    found = page(ping_pong(), tmp_path)
    for word in ("localhost", "4001", "p2p.py:9", "float32[8]", "32 B"):
        assert word in found.seen


def test_hostile_labels_stay_text(tmp_path):
    found = page({"</script><b>": odd_values(), "x": ring()}, tmp_path)
    assert "b" not in found.tags and "img" not in found.tags
    looks = found.pictures[0]["columns"]["looks"]
    marks = [look["label"] for look in looks if look["kind"] == "mark"]
    assert marks == ["</script><img src=x onerror=alert(1)>"]


@settings(deadline=None)
@given(st.text(max_size=30))
def test_data_cannot_end_its_script(label):
    text = _json({"label": label, "end": "</script><!--"})
    assert "<" not in text and ">" not in text and text.isascii()
    assert json.loads(text)["label"] == label


@settings(deadline=None)
@given(st.text(max_size=30).map(lambda s: f"<{s}>"))
def test_any_label_makes_the_same_elements(tmp_path_factory, label):
    folder = tmp_path_factory.getbasetemp()
    plain = Script().op(0, Op.SEND, 0, MS, peer=1, label="w").trace(name="run")
    odd = Script().op(0, Op.SEND, 0, MS, peer=1, label=label).trace(name=label)
    assert page(odd, folder).tags == page(plain, folder).tags


def test_long_tables_are_cut_and_say_so(tmp_path):
    found = page(big(5600, n=8), tmp_path)
    assert "the first 300 of 700 rows" in found.seen and found.tags.count("tr") == 301


def test_an_empty_trace_makes_a_page(tmp_path):
    assert len(page(Trace(), tmp_path).column("start")) == 0


def test_the_modules_join_into_one_that_exports_render():
    text = esm("timeline")
    assert "import " not in re.sub(r"//.*", "", text)
    assert re.findall(r"^export .*", text, re.MULTILINE) == ["export default { render };"]
    names = re.findall(r"^(?:const|class|function) (\w+)", text, re.MULTILINE)
    assert len(names) == len(set(names))  # a name defined twice is a syntax error
    assert ".distkit-timeline" in css("timeline")


@pytest.mark.parametrize("name", ["gz.html", "deep.html"])
def test_the_path_comes_back(tmp_path, name):
    assert ring().to_html(str(tmp_path / name)) == tmp_path / name
