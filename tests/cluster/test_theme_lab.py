"""Open views follow JupyterLab's theme, whether visible or scrolled out of view."""

from __future__ import annotations

from typing import Any

from labs import RESULTS, change_theme, open_notebook, run_cell

from distkit.views.scene.theme import WARNING_DARK, WARNING_LIGHT

START = """
import torch, torch.distributed as dist, torch.nn.functional as F
import distkit as dk

def train():
    images, labels = dk.data.shard(*dk.data.digits())
    net = dk.demos.model()
    with dk.watch_gradients(net) as watch:
        loss = dk.algorithms.sync_sgd_step(net, (images[:8], labels[:8]), F.cross_entropy, 0.2)
        watch.step(loss=loss, lr=0.2, samples=8)

def serve():
    kv = dk.kvstore.create("dist_sync")
    kv.init("w", torch.zeros(4))
    kv.push("w", torch.ones(4))

def add(size=64):
    dk.algorithms.ring_all_reduce(torch.ones(size))
    return {"sum": float(size)}

def cross():
    dist.recv(torch.ones(1), src=1 - dist.get_rank())

run = dk.run_ranks(train, 2)
with dk.Cluster(workers=2, servers=1) as pair:
    served = pair.run(serve)
cluster = dk.Cluster(2)
"""
VIEWS = (
    "dk.Gradients(run)",
    "dk.Tensors(run)",
    "dk.Timeline(run)",
    "dk.Stage(run)",
    "dk.Compare(run, run)",
    "dk.Servers(served)",
    "experiment = dk.Experiment(add, cluster, size=(64, 4096)); experiment.sweep(size=[64, 256])",
    "experiment.panel._tabs.widget.selected_index = 1; experiment",
    "cluster.run(cross)",
    "cluster",
    "stepper = cluster.step(add); stepper",
)
END = "stepper.stop(); cluster.stop()"

#: Minimum number of views with the theme's colors. The card has none, and the experiment creates
#: its timeline only when its tab is opened.
MIN_THEMED_VIEWS = 8

#: In the page: the warning color of each themed view.
WARNING_COLORS = """() => Array.from(
    document.querySelectorAll('.distkit-timeline'),
    (view) => view.style.getPropertyValue('--dk-warning'))"""
ALL_HAVE_COLOR = f"""(color) => {{
    const chosen = ({WARNING_COLORS})();
    return chosen.length >= {MIN_THEMED_VIEWS} && chosen.every((c) => c === color);
}}"""
#: In the page: whether all static pictures, such as those of a sweep, have the expected
#: color scheme.
ALL_HAVE_SCHEME = """([minimum, expected]) => {
    const images = [...document.querySelectorAll('.distkit-picture')];
    return images.length >= minimum &&
        images.every((image) => getComputedStyle(image).colorScheme === expected);
}"""


def test_every_view_follows_the_theme(lab: Any, tab: Any) -> None:
    page = tab.page
    page.set_viewport_size({"width": 1280, "height": 700})
    open_notebook(lab, page, "theme.ipynb", START, *VIEWS, END)
    for cell in range(len(VIEWS) + 1):
        run_cell(page, cell)
    for theme, color in (("Dark", WARNING_DARK), ("Light", WARNING_LIGHT)):
        change_theme(page, theme)
        page.wait_for_function(ALL_HAVE_COLOR, arg=color)
        page.wait_for_function(ALL_HAVE_SCHEME, arg=[len(VIEWS) // 2 + 1, theme.lower()])
    change_theme(page, "Dark")
    page.wait_for_function(ALL_HAVE_COLOR, arg=WARNING_DARK)
    RESULTS.mkdir(exist_ok=True)
    for i in range(len(VIEWS)):
        page.locator(".jp-Cell").nth(i + 1).scroll_into_view_if_needed()
        page.locator(".jp-Cell").nth(i + 1).screenshot(path=RESULTS / f"theme-{i}.png")
    run_cell(page, len(VIEWS) + 1)
    assert tab.errors == [] and tab.external_requests == []
