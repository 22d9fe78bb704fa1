"""The shard map: samples by replica, and shards of parameters by rank."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distkit.data import make_plan
from distkit.views.scene.renderer import drawing_of
from distkit_simulation import ShardMap
from distkit_simulation.shard_map import samples
from distkit_simulation.shard_map.samples import Grid

FILES = tuple((f"data/part-{n}.csv", rows) for n, rows in enumerate((20, 20, 15, 25, 20)))
PLANS = {
    "ten": make_plan(4, 2, samples=10),
    "shuffled": make_plan(128, 8, samples=10_000, seed=1),
    "files": make_plan(12, 3, samples=100, files=FILES),
    "off": make_plan(8, 2, samples=60, policy="OFF"),
    "many steps": make_plan(8, 8, samples=10_000),
    "too many": make_plan(512, 4, samples=1_000_000),
    "none": make_plan(2, 2, samples=0),
}


# -- samples ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PLANS)
def test_every_plan_has_a_serializable_picture(name: str) -> None:
    view = ShardMap(PLANS[name], name)
    picture = view._picture()
    json.dumps(picture, allow_nan=False)
    assert picture["title"] == name and picture["scene"]["height"] <= 440
    drawing = view._svg()
    assert ET.fromstring(drawing).tag.endswith("svg") and len(drawing.encode()) < 90_000
    assert repr(view).startswith(f"{name}: {PLANS[name].replicas} replicas, ")


def corners(view: ShardMap) -> dict[int, list[tuple[float, float]]]:
    """Return the corners of the colored cells by replica."""
    scene, found = view._picture()["scene"], {}
    for n, *_ in scene["marks"]:
        for kind, style, lane, at, _ in drawing_of(scene, n):
            if (kind, style) == ("path", "own") and "v" in dict(at)["d"]:
                words = re.findall(r"M([-\d.]+) ([-\d.]+)", dict(at)["d"])
                found.setdefault(lane, []).extend((float(x), float(y)) for x, y in words)
    return found


@pytest.mark.parametrize("name", ["ten", "files"])
def test_each_sample_has_the_color_of_its_replica(name: str) -> None:
    plan = PLANS[name]
    grid, drawing = Grid(plan.samples, plan.files), corners(ShardMap(plan))
    for replica in range(plan.replicas):
        used = {s for step in range(plan.steps) for s in plan.rows(step, replica)}
        assert {*drawing[replica]} == {grid.corners[s] for s in used}


@settings(deadline=None, max_examples=40)
@given(
    st.integers(1, 300),
    st.integers(1, 8),
    st.integers(0, 30),
    st.sampled_from([None, 7]),
    st.sampled_from(["DATA", "OFF"]),
)
def test_every_sample_is_drawn_once(
    n: int, replicas: int, extra: int, seed: int | None, policy: str
) -> None:
    plan = make_plan(replicas + extra, replicas, samples=n, seed=seed, policy=policy)
    grid = Grid(n)
    assert len({*grid.corners}) == n and grid.height <= samples.MAX_SAMPLES_HEIGHT
    drawing = corners(ShardMap(plan))
    assert sum(map(len, drawing.values())) == n * (replicas if policy == "OFF" else 1)


# -- shards -------------------------------------------------------------------------------


def parameter(name: str, shape: tuple[int, ...], ranks: int, dim: int | None = 0) -> Any:
    """Return a parameter, divided along a dimension or replicated."""
    pieces = []
    for rank in range(ranks):
        offset, piece_shape = [0] * len(shape), list(shape)
        if dim is not None:
            size = -(-shape[dim] // ranks)
            offset[dim] = min(rank * size, shape[dim])
            piece_shape[dim] = min(size, shape[dim] - offset[dim])
        placement = "Replicate()" if dim is None else f"Shard({dim})"
        pieces.append(
            {"rank": rank, "offset": offset, "shape": piece_shape, "placement": placement}
        )
    return {"name": name, "shape": list(shape), "shards": pieces}


NETS = {
    "two": [parameter("weight", (8, 6), 2), parameter("bias", (8,), 2, None)],
    "n dimensions": [parameter("conv", (64, 32, 3, 3), 4, 1), parameter("scale", (), 4, None)],
    "uneven": [parameter("weight", (5, 10_000), 4)],
    "layers": [
        parameter(f"layers.{n}.{name}", (256, 256), 8, dim)
        for n in range(12)
        for name, dim in (("up", 0), ("down", 1))
    ],
    "many": [parameter(f"block_{chr(97 + n)}.weight", (64 + n, 32), 4) for n in range(24)],
    "none": [],
}


def boxes(view: ShardMap) -> list[tuple[int, float, float, float, float]]:
    """Return the colored boxes of parameters: lane, x, y, width and height."""
    scene = view._picture()["scene"]
    found = []
    for n, *_ in scene["marks"]:
        shapes = drawing_of(scene, n)
        if any(shape[1] == "slot" for shape in shapes):
            for _, _, lane, at, _ in (shape for shape in shapes if shape[1] == "own"):
                box = {"x": 0, "y": 0, **dict(at)}
                found.append((lane, *(box[k] for k in ("x", "y", "width", "height"))))
    return found


@pytest.mark.parametrize("name", NETS)
def test_every_model_has_a_serializable_picture(name: str) -> None:
    view = ShardMap(NETS[name])
    picture = view._picture()
    json.dumps(picture, allow_nan=False)
    assert picture["scene"]["height"] <= 440 and not picture["keyframes"]
    drawing = view._svg()
    assert ET.fromstring(drawing).tag.endswith("svg") and len(drawing.encode()) < 60_000


def test_piece_is_drawn_at_its_offset() -> None:
    (one, other, *bias) = boxes(ShardMap(NETS["two"]))
    (_, x, y, width, height), (_, x2, y2, width2, height2) = one, other
    assert (x, y, x2, width2, height2) == (0, 0, 0, width, height)
    assert y2 == pytest.approx(height, abs=0.1)
    assert len({at[1:] for at in bias}) == 1  # copies


def test_shards_of_all_ranks_add_up() -> None:
    drawing = ShardMap(NETS["two"])._svg()  # 24 of 48 and 8 of 8
    assert drawing.count("57.1%") == 2 and "rank 1 has 32 of 56 values" in drawing


def test_other_objects_raise() -> None:
    for wrong in (3, [1], {"name": "weight"}, "weight"):
        with pytest.raises(TypeError, match=r"its plan, or the result of distkit_parallel\.shards"):
            ShardMap(wrong)
