"""Seeds of runs and ranks."""

from __future__ import annotations

import random
from functools import partial

import numpy as np
import pytest
import torch

from distkit.cluster.notebook import Cell
from distkit.cluster.processes import rank_spec


def without_seed(x: int) -> None: ...


def with_seed(x: int, seed: int = 0) -> None: ...


@pytest.mark.parametrize(
    ("fn", "passed"),
    [
        (without_seed, {}),
        (with_seed, {"seed": 3}),
        (partial(with_seed, 1), {"seed": 3}),
        ("train.py", {}),
        (print, {}),
        (len, {}),
    ],
)
def test_seed_is_passed_to_functions_that_accept_one(fn, passed) -> None:
    assert rank_spec.call_seed(fn, {}, 3) == (3, passed)
    seed, kwargs = rank_spec.call_seed(fn, {"lr": 1}, None)
    assert isinstance(seed, int)
    assert kwargs == {"lr": 1}


def test_runs_are_reseeded_and_cells_are_not() -> None:
    assert rank_spec.call_seed(without_seed, {}, None) != rank_spec.call_seed(
        without_seed, {}, None
    )
    cell = Cell("x = 1", "In[1]", [0])
    assert rank_spec.call_seed(cell, {}, None) == (None, {})
    assert rank_spec.call_seed(cell, {}, 5) == (5, {})


@pytest.mark.parametrize("seed", ["3", 0.5, [1]])
def test_seed_must_be_an_integer(seed: object) -> None:
    with pytest.raises(TypeError, match="seed must be an integer"):
        rank_spec.call_seed(without_seed, {}, seed)


def test_derived_seeds_are_distinct_and_reproducible() -> None:
    derived = [rank_spec.rank_seed(s, r, n) for s in (-1, 0, 1) for r in range(64) for n in (0, 1)]
    assert len({*derived}) == len(derived)
    assert len({d & 0xFFFFFFFF for d in derived}) == len(derived), (
        "torch's CPU generator uses only 32 bits"
    )
    assert rank_spec.rank_seed(1, 2, 3) == 0x19B832B2B004C52A


def draw_numbers() -> tuple[float, float, float]:
    return torch.rand(1).item(), np.random.rand(), random.random()


def test_every_generator_is_seeded() -> None:
    before = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        rounds = []
        for seed in (1, 1, 2**64 - 1, None, None):
            rank_spec.set_seeds(seed)
            rounds.append(draw_numbers())
    finally:
        torch.set_rng_state(before[0])
        np.random.set_state(before[1])
        random.setstate(before[2])
    assert rounds[0] == rounds[1]
    assert all(len({*values}) == 4 for values in zip(*rounds, strict=True))
