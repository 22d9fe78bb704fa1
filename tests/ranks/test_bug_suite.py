"""A sample of the bug suite; ``python -m tests.stress.bugs`` runs all of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.stress.bugs.suite import cases, judge, threads

SUITE = {case.name: case for case in [*cases(), *threads()]}

#: Programs that are explained rightly, at least one of each class.
SAMPLE = (
    "coll_order_all_gather_reduce_scatter",
    "coll_right_all_reduce_barrier",
    "p2p_send_recv_right",
    "root_right_gather",
    "tag_right_isend_irecv",
    "comm_right_gather",
    "group_other_order",
    "use_irecv_through_view",
    "use_waits_in_other_order",
    "coll_slow_rank",
    "buckets_in_a_set",
    "patience_on_rank_0",
)


@pytest.mark.parametrize("name", SAMPLE)
def test_program_is_explained_rightly(name: str, tmp_path: Path) -> None:
    verdict = judge(SUITE[name], tmp_path)
    assert verdict.wrong == [], verdict.shown
