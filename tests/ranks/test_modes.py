"""The same step eager and compiled: the same losses and messages, more graphs with a break."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import distkit as dk
from distkit.simulation.modes import _peak


def modes(backend: str = "eager") -> list[dict[str, Any]]:
    images, labels = dk.shard(*dk.demos.digits())
    part = images[:16], labels[:16]
    return dk.simulation.measure_modes(
        dk.demos.model, part, F.cross_entropy, backend=backend, steps=2
    )


def test_compiled_steps_learn_and_send_the_same() -> None:
    for rows in dk.run_ranks(modes, 2).results:
        eager, compiled, broken, graphs = rows
        assert [r["mode"] for r in rows[:3]] == ["eager", "compiled (eager)", "graph break (eager)"]
        assert eager["graphs"] == 0 < compiled["graphs"] < broken["graphs"]
        assert len({(r["loss"], r["all_reduces"], r["bytes"]) for r in rows[:3]}) == 1
        assert all(r["memory"] > r["bytes"] for r in rows[:3])  # a step makes all gradients
        assert eager["all_reduces"] == 1 and eager["first"] > 0 < eager["step"]
        assert graphs == {
            "mode": "CUDA graphs",
            "note": "not measured: the network is not on a GPU",
        }


def test_a_step_takes_memory_for_what_backward_needs() -> None:
    x = torch.ones(1000, requires_grad=True)

    def step() -> None:
        (x.exp() * 2).sum().backward()  # exp and its gradient, or product and exp, at once

    assert 8000 <= _peak(step, x.device) <= 20000


def test_a_network_that_is_no_sequence_is_refused() -> None:
    with pytest.raises(TypeError, match=r"a Bilinear cannot be broken .*needs an nn.Sequential"):
        dk.simulation.measure_modes(
            lambda: nn.Bilinear(2, 2, 2), (x := torch.ones(1), x), F.l1_loss
        )


def test_a_missing_compiler_is_said_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    def program() -> str:
        import os

        os.environ["PATH"], os.environ["CXX"] = "", "no-such-compiler"
        try:
            modes("inductor")
        except RuntimeError as error:
            return str(error)
        return ""

    for said in dk.run_ranks(program, 2).results:
        assert "needs a C++ compiler" in said and "backend='aot_eager'" in said
