"""Real torch dumps and profiles, read as traces."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
import torch.distributed as dist

import distkit as dk
from distkit.events import Op, State


def test_flight_recorder_dump_names_the_missing_rank(tmp_path: Path) -> None:
    def program() -> None:
        os.environ["TORCH_FR_BUFFER_SIZE"] = "100"  # read when the first call is recorded
        rank = dist.get_rank()
        group = dist.new_group([0, 1])
        dist.all_reduce(torch.ones(3))
        if rank < 2:
            dist.all_gather([torch.empty(2, 2) for _ in range(2)], torch.ones(2, 2), group=group)
            late = dist.all_reduce(torch.ones(5, dtype=torch.float64), async_op=True)
        c10d = torch._C._distributed_c10d
        tmp_path.joinpath(f"json_{rank}").write_text(
            json.dumps(json.loads(c10d._dump_fr_trace_json()))
        )
        tmp_path.joinpath(f"pickle_{rank}").write_bytes(c10d._dump_fr_trace())
        if rank < 2:
            dist.send(torch.ones(1), 2)  # after dumping the open all-reduce
            late.wait()
        else:
            assert [dist.recv(torch.ones(1), other) for other in (0, 1)] == [0, 1]
            dist.all_reduce(torch.ones(5, dtype=torch.float64))

    dk.run_ranks(program, 3)
    for kind in ("json", "pickle"):
        trace = dk.Trace.load(sorted(tmp_path.glob(f"{kind}_*")))
        assert [len(calls) for calls in trace.collectives] == [3, 2, 2]
        assert sorted(
            (s.rank, s.shape, s.dtype, s.nbytes) for s in trace.spans if s.state is State.BLOCKED
        ) == [(r, (5,), "float64", 40) for r in (0, 1)]
        (finding,) = trace.diagnose()
        assert (finding.kind, finding.culprits) == ("skipped", (2,))
    assert {s.where.partition(":")[0] for s in trace.spans} == {"test_torch_files.py"}


def test_profile_has_the_recorded_calls(tmp_path: Path) -> None:
    def program() -> None:
        rank = dist.get_rank()
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True
        ) as profile:
            with torch.profiler.record_function("forward"):
                x = torch.ones(8, 8) @ torch.ones(8, 8)
            dist.all_reduce(x)
            if rank == 0:
                dist.send(x, 1, tag=3)
            else:
                dist.recv(x, 0, tag=3)
            dist.broadcast(x, 1, async_op=True).wait()
            dist.all_gather([torch.empty(4) for _ in range(2)], torch.ones(4))
        profile.export_chrome_trace(str(tmp_path / f"rank{rank}.json"))

    recorded = dk.run_ranks(program, 2).trace
    trace = dk.Trace.load(tmp_path)

    def summary_of(t: dk.Trace) -> list[object]:
        calls = [s for s in t.spans if s.op is not Op.MARK]
        return sorted((s.rank, str(s.op), s.group, s.nbytes, s.shape, s.dtype) for s in calls)

    assert summary_of(trace) == summary_of(recorded)
    assert len(trace.collectives) == 3
    assert {s.label for s in trace.spans if s.op is Op.MARK} == {"forward"}
