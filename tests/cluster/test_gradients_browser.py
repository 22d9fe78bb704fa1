"""The gradients view of real training runs in a browser."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from sheets import Sheet
from torch.nn.parallel import DistributedDataParallel

import distkit as dk
from distkit.trace.trace import Trace
from distkit.views.gradients.scene import draw

LAYERS = ["0.weight", "0.bias", "2.weight", "2.bias"]


def train(average: bool = True) -> None:
    """Synchronous SGD on the digits, with the whole batch's gradient on rank 0."""
    images, labels = dk.demos.digits()
    mine, my = dk.data.shard(images, labels)
    net = dk.demos.model()
    all_reduce = dist.all_reduce if average else lambda gradient: None
    with dk.watch_gradients(net) as watch:
        for rows in torch.arange(32 * 6).split(32):
            if dist.get_rank() == 0:
                everything = slice(4 * int(rows[0]), 4 * int(rows[-1]) + 4)
                watch.alone(F.cross_entropy(net(images[everything]), labels[everything]))
            loss = dk.algorithms.sync_sgd_step(
                net, (mine[rows], my[rows]), F.cross_entropy, 0.2, all_reduce=all_reduce
            )
            watch.step(loss=loss, lr=0.2, samples=len(rows))


def train_ddp() -> None:
    images, labels = dk.data.shard(*dk.demos.digits())
    net = DistributedDataParallel(dk.demos.model())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.2)
    with dk.watch_gradients(net) as watch:
        for rows in torch.arange(32 * 3).split(32):
            optimizer.zero_grad()
            loss = F.cross_entropy(net(images[rows]), labels[rows])
            loss.backward()
            optimizer.step()
            watch.step(loss=loss, lr=0.2, samples=len(rows))


@pytest.fixture(scope="module")
def trace() -> Trace:
    return dk.run_ranks(train, 4).trace


def drawn(sheet: Sheet, selector: str) -> list[str]:
    return list(sheet.root.locator(selector).all_text_contents())


def test_gradients_of_synchronous_sgd_are_drawn(tab: Any, tmp_path: Path, trace: Trace) -> None:
    tab.page.emulate_media(reduced_motion="reduce")
    sheet = Sheet(tab, dk.Gradients(trace), tmp_path / "gradients.html")
    first, second, third = sheet.texts(".dkv-verdicts li span")
    assert first == "after the all-reduce every rank has the same gradient: the mean of all 4"
    assert second.startswith("one process computes the same, to ")
    assert third == "the replicas' weights are bitwise equal at every step"
    curves = ["loss", "replica drift"]
    assert [w for w in drawn(sheet, ".dkm-beside .mark-strong") if w in curves] == curves
    names = drawn(sheet, ".dkm-main .mark-strong")
    assert names[:5] == ["rank 0", "rank 1", "rank 2", "rank 3", "average"]
    assert [name for name in names if name in LAYERS] == LAYERS
    assert sum(w.startswith("norm ") for w in drawn(sheet, ".dkm-main .mark-count")) == 4 * 6

    sheet.page.focus(".dk-scrub")
    sheet.press("ArrowRight", "ArrowRight")
    assert sheet.text(".dk-fact strong") == "step 3"
    assert "step 3; 0.weight: 128 × 64; " in sheet.root.locator("> .dk-spoken").text_content()
    sheet.press("End")
    assert sheet.text(".dk-fact strong") == "step 6"
    # keys go to the view after a click anywhere in it
    sheet.root.locator(".dk-head strong").click()
    sheet.press("ArrowLeft")
    assert sheet.text(".dk-clock") == "step 5 of 6"
    assert tab.page.evaluate("leaked") == []
    sheet.fine()


def test_pointer_shows_the_values(tab: Any, tmp_path: Path, trace: Trace) -> None:
    sheet = Sheet(tab, dk.Gradients(trace), tmp_path / "gradients.html")
    reported = drawn(sheet, ".dkm-main title")
    assert any(words.startswith("8,192 values, ") and words.count("\n") == 8 for words in reported)
    assert any(words.startswith("agreement: the mean cosine") for words in reported)
    sheet.fine()


def test_unaveraged_gradients_are_marked(tab: Any, tmp_path: Path) -> None:
    view = dk.Gradients(dk.run_ranks(train, 2, average=False).trace)
    sheet = Sheet(tab, view, tmp_path / "gradients.html")
    assert sheet.texts(".dkv-wrong span")[0].endswith("nothing was averaged")
    assert sheet.texts(".dkv-wrong span")[-1].endswith(" from rank 0 after step 6")
    assert drawn(sheet, ".mark-late") == ["≠ by rank"] * 4
    assert not any("agreement" in words for words in drawn(sheet, ".mark-small"))
    sheet.fine()


def test_gradients_of_ddp_are_drawn(tab: Any, tmp_path: Path) -> None:
    sheet = Sheet(tab, dk.Gradients(dk.run_ranks(train_ddp, 2).trace), tmp_path / "g.html")
    assert sheet.texts(".dkv-same span")[0].endswith("the mean of all 2")
    assert sum(w.startswith("colours: ") for w in drawn(sheet, ".mark-small")) == 4
    sheet.fine()


def test_view_grows_during_the_run(tab: Any, tmp_path: Path, trace: Trace) -> None:
    first = Trace(trace[: len(trace) // 2], trace.info)
    view = dk.Gradients(first)
    view._live, view._data = True, draw(first, live=True)
    sheet = Sheet(tab, view, tmp_path / "gradients.html")
    assert sheet.text(".dk-live") == "live"
    sheet.renew(trace)
    assert sheet.text(".dk-fact strong") == "step 6"  # the view follows the run
    assert sheet.root.locator(".dk-live").count() == 0
    sheet.fine()


def test_pictures_are_saved(tab: Any, tmp_path: Path, trace: Trace) -> None:
    sheet = Sheet(tab, dk.Gradients(trace), tmp_path / "gradients.html")
    sheet.pictures("gradients")
    assert sheet.root.evaluate("e => e.scrollWidth <= e.clientWidth")
    sheet.fine()
