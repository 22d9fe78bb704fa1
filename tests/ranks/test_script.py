"""A lesson's function, exported and run by torchrun where distkit is not: the same losses."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import distkit as dk
from distkit_experiments.script import export

NOTEBOOK = Path(__file__).parents[2] / "notebooks/03_sync_sgd.ipynb"

LESSON = """
import torch
import torch.distributed as dist
import torch.nn.functional as F
import distkit as dk

def train(epochs=1):
    images, labels = dk.shard(*dk.demos.digits())
    net = dk.demos.model()
    dk.sync_initial_weights(net)
    losses = []
    for rows in dk.progress(epochs * torch.arange(len(images)).split(32)):
        batch = images[rows], labels[rows]
        losses.append(dk.sync_sgd_step(net, batch, F.cross_entropy, 0.2, all_reduce=reduce).item())
    return losses
reduce = dk.ring_all_reduce
"""


@pytest.mark.parametrize("reduce", ["dk.ring_all_reduce", "dist.all_reduce"])
def test_losses_are_those_of_the_lesson_to_the_bit(tmp_path: Path, reduce: str) -> None:
    lesson, script = tmp_path / "lesson.py", tmp_path / "script.py"
    lesson.write_text(LESSON.replace("dk.ring_all_reduce", reduce))
    script.write_text(export(lesson, "train"))
    tmp_path.joinpath("distkit.py").write_text("raise ImportError('there is no distkit here')")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", str(script)]
    environ = {**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environ)
    found = dict(re.findall(r"rank (\d): (\[.*?\])", ran.stdout))
    assert len(found) == 2, ran.stderr

    space: dict[str, object] = {"__name__": "lesson"}
    exec(compile(lesson.read_text(), str(lesson), "exec"), space)
    expected = dk.run_ranks(space["train"], 2).results
    assert [ast.literal_eval(found[str(rank)]) for rank in range(2)] == expected


def test_the_notebooks_training_function_can_be_exported() -> None:
    assert "\ndef sync_sgd_step(" in export(NOTEBOOK, "train")
