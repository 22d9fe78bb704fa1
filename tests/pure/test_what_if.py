"""Recorded steps of pipelines, as published by ByteDance, replayed without stragglers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import distkit as dk
from distkit.events import Op
from distkit_simulation import ideal_step


def chrome(slow: dict[tuple[int, int], float]) -> list[dict[str, Any]]:
    """Return two steps of two copies of two stages, two micro-batches; ``slow``: (stage, copy)."""
    events: list[dict[str, Any]] = []
    for copy in range(2):
        for stage in range(2):
            tid = 10 * stage + 5 * copy
            name = {"name": f"PP rank {stage}, TP rank 0, compute"}
            events.append({"ph": "M", "name": "thread_name", "pid": copy, "tid": tid, "args": name})
            work = slow.get((stage, copy), 1.0)
            calls = [("params-all-gather", -1, 0.0, 0.5)]
            for mb in range(2):
                calls.append(("forward-compute", mb, 1.0 + stage + mb, work))
                calls.append(("backward-compute", mb, 4.0 - stage + 3 * mb, 2 * work))
            way = (
                ("backward-recv", "forward-send")[::-1]
                if stage == 0
                else ("forward-recv", "backward-send")
            )
            calls += [(kind, -1, 2.0 + mb, 0.0) for kind in way for mb in range(2)]
            calls.append(("grads-reduce-scatter", -1, 9.0, 1.0))
            calls.append(("optimizer", -1, 10.0, 0.5))
            events += [
                {
                    "ph": "X",
                    "name": kind,
                    "pid": copy,
                    "tid": tid,
                    "ts": 1e6 * (begin + 20 * step),
                    "dur": 1e6 * took,
                    "args": {"step": step, "mb_id": mb},
                }
                for step in range(2)
                for kind, mb, begin, took in calls
            ]
    return events


def load(folder: Path, **slow: Any) -> dk.Trace:
    path = folder / "timeline.json"
    path.write_text(json.dumps(chrome(slow.get("slow", {}))))
    return dk.Trace.load(path)


def test_job_timeline_can_be_saved_as_trace(tmp_path: Path) -> None:
    trace = load(tmp_path)
    assert trace.ranks == [0, 1, 2, 3]
    assert trace.info.groups["stage 1"] == [2, 3]
    assert trace.info.groups["ends of copy 0"] == [0, 2]
    sends = [s for s in trace.spans if s.op is Op.SEND]
    assert {(s.rank, s.peer) for s in sends} == {(0, 2), (1, 3), (2, 0), (3, 1)}
    again = dk.Trace.load(trace.save(tmp_path / "saved.gz"))
    assert ideal_step(again) == ideal_step(trace)


@pytest.mark.parametrize(
    ("slow", "says"),
    [
        ({}, ""),
        ({(1, 1): 2.0}, "rank 3 (stage 1) computes 2.00 times"),
        ({(1, 0): 1.5, (1, 1): 1.5}, "stage 1 computes 1.20 times"),
    ],
)
def test_ideal_step_has_equal_durations_and_names_the_slow_rank(
    tmp_path: Path, slow: dict[tuple[int, int], float], says: str
) -> None:
    found = ideal_step(load(tmp_path, slow=slow))
    mean = sum(slow.get((stage, copy), 1.0) for stage in (0, 1) for copy in (0, 1)) / 4
    assert found.ideal == pytest.approx(0.5 + 3 * 3 * mean + 1.5)  # (m + p - 1) (F + B)
    assert found.slow.startswith(says) and bool(found.slow) == bool(says)
    assert "s without stragglers" in str(found)


def test_other_traces_raise() -> None:
    with pytest.raises(ValueError, match="has a stage"):
        ideal_step(dk.Trace())
