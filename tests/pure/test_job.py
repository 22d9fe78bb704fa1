"""A training job: time by part, memory, trace, and layouts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from distkit_parallel import LLAMA_3_8B, Layout, Transformer
from distkit_simulation import A100, H100, Job, Link, search_layouts

GPT = Transformer.gpt(96, 12288, 96)
SMALL = Transformer.gpt(24, 2048, 16)
LAYOUT = Layout(dp=2, tp=4, pp=4)


def job(**options) -> Job:
    return Job(SMALL, LAYOUT, A100, **{"batch": 64, "sequence": 2048, "micro_batch": 4, **options})


def test_step_is_the_sum_of_its_displayed_parts() -> None:
    found = job()
    assert found.seconds == pytest.approx(sum(found.parts.values()))
    assert found.tokens_per_second == pytest.approx(64 * 2048 / found.seconds)
    assert 0.05 < found.utilization < 0.6
    lines = repr(found).splitlines()
    assert lines[0].startswith(
        "1.3 billion parameters on 32 A100: dp 2 · pp 4 · tp 4 · 8 micro-batches of 4, 1f1b"
    )
    assert [line.split()[0] for line in lines[2:-1]] == [*found.parts]
    assert "GiB per GPU: parameters" in lines[-1]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"schedule": "gpipe"},
        {"schedule": "interleaved", "chunks": 3},
        {"recompute": "none", "micro_batch": 2},
        {"recompute": "selective", "sequence_parallel": True},
    ],
)
def test_duration_of_the_trace_matches_the_formulas(options: dict) -> None:
    found = job(**options)
    assert found.trace.seconds == pytest.approx(found.seconds, rel=0.02)
    assert len(found.trace.ranks) == 4


def test_each_option_affects_its_cost() -> None:
    full, selective = job(), job(recompute="selective")
    assert selective.parts["compute"] < full.parts["compute"]
    assert selective.parts["tensor"] == pytest.approx(full.parts["tensor"] * 4 / 6)
    assert job(sequence_parallel=True).parts["compute"] < full.parts["compute"]
    assert job(schedule="interleaved", chunks=2).parts["bubble"] < full.parts["bubble"]
    assert job(zero=1).stage_memory(0)["optimizer"] == full.stage_memory(0)["optimizer"] / 2
    long = {"sequence": 4096, "recompute": "none", "micro_batch": 1, "batch": 16}
    assert job(flash=True, **long).seconds < Job(SMALL, LAYOUT, A100, **long).seconds
    slow_network = replace(A100, between=Link.of(5e-6, 10e9))
    assert Job(SMALL, LAYOUT, slow_network, 64, 2048, 4).parts["data"] > full.parts["data"]
    assert Job(SMALL, LAYOUT, H100, 64, 2048, 4).seconds < full.seconds


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch": 12}, "a batch of 12 is not divisible by dp · micro-batch = 2 · 4"),
        ({"micro_batch": 0}, "micro_batch = 0 is not a positive integer"),
        ({"chunks": 2}, "1F1B has one stage per rank"),
        ({"recompute": "most"}, "recompute='most': use 'none', 'selective', 'full'"),
        ({"zero": 4}, "ZeRO needs a stage from 0 to 3"),
    ],
)
def test_invalid_jobs_raise_immediately(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        job(**options)


def test_layouts_are_sorted_by_time_and_fit_in_memory() -> None:
    found = search_layouts(LLAMA_3_8B, H100, 64, batch=256, sequence=4096, flash=True, zero=1)
    assert [candidate.seconds for candidate in found] == sorted(
        candidate.seconds for candidate in found
    )
    assert all(sum(candidate.stage_memory(0).values()) <= H100.memory for candidate in found)
    assert {candidate.layout.size for candidate in found} == {64}
    assert repr(found).splitlines()[0].startswith(found[0].title)
    assert len(found.plot(5).axes[0].get_yticklabels()) == 5
    assert repr(search_layouts(GPT, A100, 1, batch=1, sequence=2048)) == "no layout fits"
