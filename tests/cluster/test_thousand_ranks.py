"""A thousand ranks in a real browser: drawn sensibly, or the first ones and a notice."""

from pathlib import Path
from typing import Any

import pytest
from sheets import Sheet

import distkit as dk
from distkit.events import Event, Op, State, Summary
from distkit.trace.trace import Trace

N = 1000


def values(*numbers: float) -> Summary:
    norm = sum(x * x for x in numbers) ** 0.5
    return Summary(numbers, norm, min(numbers), max(numbers), len(numbers))


@pytest.fixture(scope="module")
def trace() -> Trace:
    """Two steps of data-parallel training: gradients, their all-reduce, a message to the right."""
    events = []

    def put(rank: int, seq: int, op: Op, at: float, *, before: Any = None, **more: Any) -> None:
        more |= {"nbytes": 8, "shape": (2,), "dtype": "float32", "where": "train.py:7"}
        late, after = at + 0.01 + rank * 1e-6, values(3.0, 4.0)
        events.append(Event(rank, seq, op, State.STARTED, at, summary=before, **more))
        events.append(Event(rank, seq, op, State.COMPLETED, late, summary=after, **more))

    for r in range(N):
        for step in (0, 1):
            at, seq, own = step + r * 1e-5, 5 * step, values(1.0 + r, 2.0)
            put(
                r,
                seq,
                Op.MARK,
                at,
                before=own,
                attributes={"watched": "gradient", "name": "weight"},
            )
            put(r, seq + 1, Op.ALL_REDUCE, at + 0.1, before=own)
            events.append(
                Event(
                    r,
                    seq + 2,
                    Op.MARK,
                    State.COMPLETED,
                    at + 0.3,
                    attributes={"watched": "step"},
                    summary=values(1.0 / (step + 1), 0.1, 8.0),
                )
            )
            put(r, seq + 3, Op.SEND, at + 0.4, before=own, peer=(r + 1) % N)
            put(r, seq + 4, Op.RECV, at + 0.4, peer=(r - 1) % N)
    return Trace(events, {"name": "a thousand ranks", "world_size": N})


@pytest.mark.parametrize("view", [dk.Timeline, dk.Tensors, dk.Gradients])
def test_a_thousand_ranks_are_drawn(view: Any, trace: Trace, tab: Any, tmp_path: Path) -> None:
    name = view.__name__.lower()
    sheet = Sheet(tab, view(trace), tmp_path / f"{name}.html")
    assert "1,000 ranks" in sheet.root.inner_text()
    assert sheet.painted("canvas")
    assert sheet.root.locator("*").count() < 3_000
    sheet.pictures(f"thousand-{name}")
    sheet.fine()
