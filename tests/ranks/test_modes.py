"""The same step eager and compiled: the same losses and messages, more graphs with a break."""

from __future__ import annotations

from typing import Any

import pytest
import torch.nn.functional as F

import distkit as dk


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
        assert len({(r["loss"], r["messages"], r["bytes"]) for r in rows[:3]}) == 1
        assert eager["messages"] == 1 and eager["first"] > 0 < eager["step"]
        assert graphs == {
            "mode": "CUDA graphs",
            "note": "not measured: the network is not on a GPU",
        }


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
