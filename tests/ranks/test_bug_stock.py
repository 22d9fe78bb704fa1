"""Programs of the bug suite on plain torch."""

from __future__ import annotations

from pathlib import Path

from tests.stress.bugs.stock import StockVerdict, run
from tests.stress.bugs.suite import Case

HEAD = """\
import sys
import torch
import torch.distributed as dist

def program():
"""

RIGHT = """\
    assert "distkit" not in sys.modules
    x = torch.ones(1)
    dist.all_reduce(x)
    assert x.item() == 2
"""

HANG = """\
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(4))  # <-
    else:
        dist.barrier()  # <-
"""


def case(name: str, ok: bool, body: str) -> Case:
    return Case(name, "call/coll", ok, 2, (), ("order",), False, HEAD + body)


def test_plain_torch_reports_a_hang_as_a_timeout(tmp_path: Path) -> None:
    programs = [case("right", True, RIGHT), case("hang", False, HANG)]
    reports = run(programs, "plain", tmp_path, timeout=2.0)
    right, hang = (StockVerdict(program, reports[program.name]) for program in programs)
    assert (right.report.how, right.report.text) == ("silent", "")
    assert hang.report.how == "timeout" and "Timed out" in hang.report.text
    assert not hang.reported and hang.counting_timeouts().reported
    assert hang.right_line and not hang.explained
