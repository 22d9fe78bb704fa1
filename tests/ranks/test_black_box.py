"""The trace contains the last calls of a rank whose process exited."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import distkit as dk
from distkit.cluster import Run
from distkit.events import Op, State
from distkit.recording.encoding import SLOTS


def trace_of(run: object) -> dk.Trace:
    """Return the trace of a run in which a rank died."""
    assert isinstance(run, Run)
    return run.trace


@pytest.mark.parametrize("calls", [1, 2 * SLOTS])
def test_last_calls_of_a_killed_rank_are_in_the_trace(calls: int) -> None:
    def program(calls: int) -> None:
        for _ in range(calls):
            dist.all_reduce(torch.ones(3))
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()

    with pytest.raises(dk.errors.RankDied) as caught:
        dk.run_ranks(program, 2, calls)
    trace = trace_of(caught.value.run)
    mine = [s for s in trace.spans if s.rank == 1 and s.op is Op.ALL_REDUCE]
    assert [s.state for s in mine[-5:]] == [State.COMPLETED] * min(calls, 5)
    theirs = [s for s in trace.spans if s.rank == 0 and s.op is Op.ALL_REDUCE]
    assert mine[-1].seq == theirs[-1].seq
    assert len(set(trace.events)) == len(trace), "no event is repeated"


def test_death_is_located_at_the_current_call() -> None:
    def program() -> None:
        if dist.get_rank() == 0:
            dist.send(torch.ones(100), dst=1)
        else:
            dist.recv(torch.zeros(2), src=0)  # aborts

    with pytest.raises(dk.errors.RankDied, match="SIGABRT") as caught:
        dk.run_ranks(program, 2)
    last = trace_of(caught.value.run).by_rank[1][-1]
    assert (last.op, last.state, last.peer, last.shape) == (Op.RECV, State.STARTED, 0, (2,))
    file, _, line = caught.value.line.rpartition(":")
    assert caught.value.line == last.where
    assert "# aborts" in Path(file).read_text().splitlines()[int(line) - 1]
