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

LAYERS = ["0.weight", "0.bias", "2.weight", "2.bias"]


def train() -> None:
    """Run synchronous SGD on the digits; rank 0 also computes the gradient of the whole batch."""
    images, labels = dk.data.digits()
    local_images, local_labels = dk.data.shard(images, labels)
    net = dk.demos.model()
    with dk.watch_gradients(net) as watch:
        for rows in torch.arange(32 * 6).split(32):
            if dist.get_rank() == 0:
                global_batch = slice(4 * int(rows[0]), 4 * int(rows[-1]) + 4)
                watch.reference(F.cross_entropy(net(images[global_batch]), labels[global_batch]))
            loss = dk.algorithms.sync_sgd_step(
                net, (local_images[rows], local_labels[rows]), F.cross_entropy, 0.2
            )
            watch.step(loss=loss, lr=0.2, samples=len(rows))


def train_ddp() -> None:
    images, labels = dk.data.shard(*dk.data.digits())
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


def texts_of(sheet: Sheet, selector: str) -> list[str]:
    return list(sheet.root.locator(selector).all_text_contents())


def test_gradients_of_synchronous_sgd_are_drawn(tab: Any, tmp_path: Path, trace: Trace) -> None:
    tab.page.emulate_media(reduced_motion="reduce")
    sheet = Sheet(tab, dk.Gradients(trace), tmp_path / "gradients.html")
    first, second, third = sheet.texts(".dkv-verdicts li span")
    assert (
        first == "after the all-reduce every rank has the same gradient: the mean over all 4 ranks"
    )
    assert second.startswith("one process computes the same, to ")
    assert third == "the replicas' weights are bitwise equal at every step"
    names = texts_of(sheet, ".dkm-main .mark-strong")
    assert names[:5] == ["rank 0", "rank 1", "rank 2", "rank 3", "mean"]
    assert [name for name in names if name in LAYERS] == LAYERS

    sheet.page.focus(".dk-scrub")
    sheet.press("ArrowRight", "ArrowRight")
    assert sheet.text(".dk-clock") == "step 3 of 6"
    loss = sheet.text(".dk-fact strong")
    assert float(loss.removeprefix("mean loss ")) > 0
    spoken = sheet.root.locator("> .dk-spoken").text_content()
    assert f"step 3 of 6; {loss}; 0.weight: 128 × 64 (64 shown); " in spoken
    sheet.save_screenshots("gradients")
    assert sheet.root.evaluate("e => e.scrollWidth <= e.clientWidth")
    sheet.assert_clean()


def test_gradients_of_ddp_are_drawn(tab: Any, tmp_path: Path) -> None:
    sheet = Sheet(tab, dk.Gradients(dk.run_ranks(train_ddp, 2).trace), tmp_path / "g.html")
    assert sheet.texts(".dkv-same span")[0].endswith("the mean over all 2 ranks")
    assert sum(w.startswith("±") for w in texts_of(sheet, ".dkm-main .mark-tick")) == 4  # scales
    sheet.assert_clean()
