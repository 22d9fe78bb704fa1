"""Pipelines on ranks, compared with one process."""

from __future__ import annotations

from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import nn
from training import error_message

import distkit as dk
from distkit_parallel import pipeline_step, split

LAYERS, ROWS = 4, 7


def model() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(LAYERS)]
    return nn.Sequential(*layers).double()


def batch(rows: int = ROWS) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(2, rows, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return x[0], x[1]


loss_fn = nn.functional.mse_loss


def run_in_one_process(rows: int = ROWS) -> tuple[torch.Tensor, list[list[torch.Tensor]]]:
    """Return the loss, and the gradients by layer, from one process."""
    layers, (x, y) = model(), batch(rows)
    loss = loss_fn(layers(x), y)
    loss.backward()
    return loss.detach(), [[w.grad for w in layer.parameters()] for layer in layers]


def close(result: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool(torch.allclose(result, expected, rtol=1e-12, atol=1e-12))


@pytest.mark.parametrize("n", [1, 3, 4])
def test_reference_implementation_equals_one_process(n: int) -> None:
    """The cases include fewer micro-batches than stages, and micro-batches of unequal sizes."""
    cases = [*product(["gpipe", "1f1b"], range(1, ROWS + 1))]

    def program() -> list[tuple[torch.Tensor, list[torch.Tensor]]]:
        found = []
        for schedule, m in cases:
            stage = split(model(), n)[dist.get_rank()]
            loss = pipeline_step(stage, batch(), loss_fn, microbatches=m, schedule=schedule)
            found.append((loss, [w.grad for w in stage.parameters()]))
        return found

    loss, gradients = run_in_one_process()
    expected = [g for layer in gradients for g in layer]
    run = dk.run_ranks(program, n)
    for i, case in enumerate(cases):
        assert all(close(result[i][0], loss) for result in run.results)
        mine = [g for result in run.results for g in result[i][1]]
        assert all(close(a, b) for a, b in zip(mine, expected, strict=True)), case


def test_messages_are_activations_and_gradients() -> None:
    def program() -> None:
        pipeline_step(split(model(), 3)[dist.get_rank()], batch(), loss_fn, microbatches=5)

    trace = dk.run_ranks(program, 3).trace
    messages = [m for m in trace.messages if m.nbytes in (6 * 8, 2 * 6 * 8)]  # one row, or two
    assert sum(m.src < m.dst for m in messages) == sum(m.src > m.dst for m in messages) == 2 * 5


INVALID_CALLS = {
    "microbatches must be from 1 to the number of rows, 7; got 8": lambda s: pipeline_step(
        s, batch(), loss_fn, microbatches=8
    ),
    "7 inputs and 6 targets": lambda s: pipeline_step(
        s, (batch()[0], batch(6)[1]), loss_fn, microbatches=2
    ),
    "pipeline_step supports gpipe and 1f1b, not 'interleaved'": lambda s: pipeline_step(
        s, batch(), loss_fn, microbatches=2, schedule="interleaved"
    ),
}


def test_invalid_pipeline_raises_on_every_rank_before_any_message() -> None:
    def program() -> list[str]:
        stage = split(model(), 2)[dist.get_rank()]
        return [error_message(ValueError, call, stage) for call in INVALID_CALLS.values()]

    run = dk.run_ranks(program, 2)
    assert not run.trace.messages
    for errors in run.results:
        assert all(a in b for a, b in zip(INVALID_CALLS, errors, strict=True)), errors


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        (nn.Flatten(0), r"stage Flatten returned a tensor of shape \(42,\) for 7 rows"),
        (nn.LSTM(6, 6).double(), "stage LSTM returned tuple for 7 rows"),
    ],
)
def test_stage_without_output_rows_raises_without_a_hang(stage: nn.Module, message: str) -> None:
    with pytest.raises(dk.errors.RankError, match=message):
        dk.run_ranks(pipeline_step, 2, stage, batch(), loss_fn, microbatches=1)
