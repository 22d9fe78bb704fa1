"""A sample of the bug suite, one program of each class; ``make stress`` runs all of it.

The classes are those of the MPI Bugs Initiative (an incorrect and a correct program), threads, and
the themes of bugs from issues: each takes a different path through the diagnosis.
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
    "use_ar_hooks_opt",
    "use_waits_in_other_order",
    "use_ddp_hook",
    "wait_batch",
    "group_leak_in_loop",
    "group_destroyed_by_one",
    "group_leak_twice_kept",
    "coll_slow_rank",
    "buffer_ring",
    "group_other_order",
    "buckets_in_a_set",
    "mixed_right_broadcast_send_irecv",
    "race_any_with_reply",
    "root_right_gather",
    "comm_right_gather",
    "group_rank_as_root",
    "group_used_after_destroy",
    "group_members_only",
    "group_world_destroyed_by_one",
    "group_leak_kept_list",
    "group_in_loop_destroyed",
    "use_ar_second_backward",
    "use_isend_numpy_write",
    "use_compiled",
    "use_two_reduces_one_buffer",
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
    "cond_early_return_of_a_wrapper",
    "cond_short_circuit",
    "coll_order_all_reduce_barrier",
    "coll_early_return_then_barrier",
    # destination, choice and order of messages
    "p2p_wrong_destination",
    "race_sum_of_two_lines",
    "race_then_fixed_source",
    "size_messages_in_another_order",
    "order_of_equal_broadcasts_in_a_loop",
    "order_of_own_shards",
    # splits, gradients, arguments, exits
    "size_all_to_all_splits",
    "size_splits_too_short",
    "coll_splits_of_exchanged_counts",
    "encoder_result_unused_on_one_rank",
    "arg_op_is_a_word",
    "cond_sys_exit_in_a_loop",
)


@pytest.mark.parametrize("name", SAMPLE)
def test_program_is_explained_correctly(name: str, tmp_path: Path) -> None:
    verdict = judge(SUITE[name], tmp_path)
    assert verdict.wrong == [], verdict.shown


def test_sample_covers_every_explained_class() -> None:
    """test_hangs.py runs all hangs of the catalogue."""
    missing = {case.cls for case in SUITE.values()} - {SUITE[name].cls for name in SAMPLE}
    assert missing == {"theme/hangs"}


def test_names_are_unique_and_culprits_are_ranks() -> None:
    every = [*cases(), *threads(), *themes()]
    assert len(SUITE) == len(every) and len(themes()) >= 100
    assert all(rank < case.ranks for case in every for rank in case.culprits)
