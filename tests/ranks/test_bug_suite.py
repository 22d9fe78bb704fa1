"""A sample of the bug suite; ``make stress`` runs the whole suite.

The sample has programs from each class, except for the hangs that test_hangs.py runs. Each program
takes a different path through the diagnosis.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.stress.bugs.suite import cases, judge, themes, threads

SUITE = {case.name: case for case in [*cases(), *threads(), *themes()]}

SAMPLE = (
    "coll_order_all_gather_reduce_scatter",
    "cond_only_rank_0_then_barrier",
    "p2p_recv_without_send",
    "mixed_all_reduce_send_recv",
    "root_gather",
    "op_all_reduce",
    "dtype_message_same_bytes",
    "size_all_gather",
    "tag_isend_recv",
    "comm_message",
    "arg_gather_x_None_dst_n",
    "wait_all_reduce",
    "use_irecv_through_view",
    "use_isend_irecv_same",
    "use_ddp_hook",
    "group_leak_in_loop",
    "coll_slow_rank",
    "buffer_ring",
    "group_other_order",
    "buckets_in_a_set",
    "mixed_right_broadcast_send_irecv",
    "race_any_with_reply",
    "root_right_gather",
    "comm_right_gather",
    "group_rank_as_root",
    "group_leak_kept_list",
    "use_compiled",
    "use_optimizer_before_wait",
    "threads_two_groups",
    "early_stopping_on_one_rank",
    "saving_has_a_barrier_inside",
    "reduce_for_all_reduce",
    "each_node_makes_its_own_group",
    "forward_meets_backward",
    "an_expert_without_tokens",
    "nan_is_an_error",
    "uneven_iterable_dataset",
    "store_misspelt_key",
    "patience_on_rank_0",
    # a size hidden by another reduction; the innermost condition; a barrier that all reach
    "op_and_size",
    "dummy_batches_out_of_step",
    "cond_nested_in_a_flag",
    "coll_early_return_then_barrier",
    # order of messages
    "race_sum_of_two_lines",
    "race_then_fixed_source",
    # splits, gradients, arguments, exits
    "size_all_to_all_splits",
    "coll_splits_of_exchanged_counts",
    "encoder_result_unused_on_one_rank",
    "cond_sys_exit_in_a_loop",
)


@pytest.mark.parametrize("name", SAMPLE)
def test_program_is_explained_correctly(name: str, tmp_path: Path) -> None:
    verdict = judge(SUITE[name], tmp_path)
    assert verdict.wrong == [], verdict.shown


def test_sample_covers_every_explained_class() -> None:
    """test_hangs.py runs all hangs of the catalog."""
    missing = {case.cls for case in SUITE.values()} - {SUITE[name].cls for name in SAMPLE}
    assert missing == {"theme/hangs"}


def test_names_are_unique_and_culprits_are_ranks() -> None:
    all_cases = [*cases(), *threads(), *themes()]
    assert len(SUITE) == len(all_cases) and len(themes()) >= 100
    assert all(rank < case.ranks for case in all_cases for rank in case.culprits)
