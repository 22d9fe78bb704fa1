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
    "use_isend_irecv_same",
    "use_ar_hooks_opt",
    "use_waits_in_other_order",
    "use_ddp_hook",
    "wait_batch",
    "group_leak_in_loop",
    "group_destroyed_by_one",
    "group_leak_twice_kept",
    "coll_slow_rank",
    "buckets_in_a_set",
    "patience_on_rank_0",
    # a size that another reduction hides; the innermost condition; a barrier that all come to
    "op_and_size",
    "dummy_batches_out_of_step",
    "cond_nested_in_a_flag",
    "cond_early_return_of_a_wrapper",
    "cond_short_circuit",
    "coll_order_all_reduce_barrier",
    "coll_early_return_then_barrier",
    # where a message goes, which is taken first, and in which order
    "p2p_wrong_destination",
    "race_two_senders",
    "race_sum_of_two_lines",
    "race_then_fixed_source",
    "size_messages_in_another_order",
    "activation_taken_for_gradient_silently",
    "order_of_equal_broadcasts_in_a_loop",
    "order_of_own_shards",
    # splits, gradients, arguments, exits
    "size_all_to_all_splits",
    "size_splits_too_short",
    "coll_splits_of_exchanged_counts",
    "encoder_result_unused_on_one_rank",
    "gradient_of_a_broadcast_is_zero",
    "arg_op_is_a_word",
    "cond_sys_exit_in_a_loop",
)


@pytest.mark.parametrize("name", SAMPLE)
def test_program_is_explained_rightly(name: str, tmp_path: Path) -> None:
    verdict = judge(SUITE[name], tmp_path)
    assert verdict.wrong == [], verdict.shown
