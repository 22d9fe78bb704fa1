"""A part of the catalogue of bugs on real ranks; ``distkit bench bugs`` runs all of it."""

from __future__ import annotations

import pytest

from benchmarks import bugs

CHOSEN = (
    "early_stopping_on_one_rank",
    "saving_has_a_barrier_inside",
    "logging_reduces_on_rank_0",
    "reduce_for_all_reduce",
    "each_node_makes_its_own_group",
    "an_expert_without_tokens",
    "a_barrier_in_finally",
    "full_tensor_on_rank_0",
)


@pytest.mark.parametrize("name", CHOSEN)
def test_a_bug_is_explained(name: str) -> None:
    (bug,) = (b for b in bugs.catalogue() if b.name == name)
    verdict = bugs.judge(bug)
    wrong = [w for w in verdict.wrong if not w.startswith("late")]  # the machine may be busy
    assert wrong == [], verdict.row()


def test_the_catalogue_is_in_order() -> None:
    found = bugs.catalogue()
    names = [b.name for b in found]
    assert len(names) == len(set(names)) >= 100
    for b in found:
        assert b.program.__doc__ and b.how in ("hangs", "fails", "finishes")
        assert all(r < b.ranks for r in b.culprits) and b.culprits
