"""Schedules, verified by counting the contributions in each rank's chunks."""

from __future__ import annotations

from inspect import signature

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distkit.algorithms.all_reduce import ALL_REDUCES
from distkit.algorithms.catalog import Algorithm
from distkit.algorithms.collectives import COLLECTIVES
from distkit.algorithms.rounds import Round, count_contributions

SIZES = [*range(1, 65)]
every_algorithm = pytest.mark.parametrize(
    "algorithm", [*ALL_REDUCES.values(), *COLLECTIVES.values()], ids=lambda a: a.name
)
collectives = pytest.mark.parametrize("algorithm", COLLECTIVES.values(), ids=COLLECTIVES)


# -- results -------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ALL_REDUCES.values(), ids=ALL_REDUCES)
def test_all_reduce_adds_every_contribution_once(algorithm: Algorithm) -> None:
    for n in SIZES:
        have = count_contributions(algorithm.schedule(n), n, algorithm.chunks(n))
        assert (have == 1).all(), f"{n} ranks"


@settings(max_examples=40)
@given(st.integers(1, 16), st.integers(1, 7))
def test_all_reduce_is_correct_with_options(n: int, option: int) -> None:
    for name, option_name, ranks in (
        ("double_tree", "segments", n),
        ("hierarchical", "devices_per_host", n),
        ("torus", "devices_per_host", n * option),
    ):
        a, options = ALL_REDUCES[name], {option_name: option}
        chunks = a.chunks(ranks, **options)
        assert (count_contributions(a.schedule(ranks, **options), ranks, chunks) == 1).all()


def test_torus_needs_a_full_grid() -> None:
    with pytest.raises(ValueError, match="a divisor of the number of ranks, 7; got 2"):
        next(ALL_REDUCES["torus"].schedule(7, devices_per_host=2))


def has_result(name: str, have: np.ndarray, root: int) -> bool:
    """Return whether every rank has the collective's result; ``have[rank, chunk, source]``."""
    n = len(have)
    r, ones = np.arange(n), np.eye(n, dtype=int)
    order = (r + root) % n  # the ranks, starting at the root
    return {
        "all_reduce": lambda: (have == 1).all(),
        "broadcast": lambda: (have == ones[root]).all(),
        "reduce": lambda: (have[root] == 1).all(),
        "scatter": lambda: (have[order, r] == ones[root]).all(),
        "gather": lambda: (have[root] == ones[order]).all(),
        "all_gather": lambda: (have == ones).all(),
        "reduce_scatter": lambda: (have[r, r] == 1).all(),
        "all_to_all": lambda: all((have.reshape(n, n, n, n)[i, :, i] == ones).all() for i in r),
        "barrier": lambda: (have > 0).all(),  # every rank has received from every other
    }[name]()


@collectives
def test_collective_produces_specified_result(algorithm: Algorithm) -> None:
    """Use every root for up to 16 ranks, and the first and the last for more."""
    for n in SIZES if algorithm.name != "all_to_all" else SIZES[:16]:
        chunks, rooted = algorithm.chunks(n), "root" in signature(algorithm.schedule).parameters
        for root in (range(n) if n <= 16 else [0, n - 1]) if rooted else [None]:
            rounds = algorithm.schedule(n) if root is None else algorithm.schedule(n, root)
            assert has_result(algorithm.name, count_contributions(rounds, n, chunks), root or 0), (
                n,
                root,
            )


def test_inconsistent_round_raises() -> None:
    two, one = np.array([1, 2]), np.array([0, 0])
    for reduce in (False, np.array([True, False])):
        with pytest.raises(ValueError, match="round 0 overwrites a chunk"):
            count_contributions([Round(two, one, one, reduce)], 3)
    assert count_contributions([Round(two, one, one, reduce=True)], 3)[0, 0].tolist() == [1, 1, 1]


# -- costs ---------------------------------------------------------------------------------


#: Number of rounds, and the largest number of messages and volume (as a fraction of the tensor's
#: size K) that a rank sends, for eight and six ranks.
COSTS = {
    "reduce_broadcast": ((2, 7, 7), (2, 5, 5)),
    "flat": ((1, 7, 7), (1, 5, 5)),
    "ring": ((14, 14, 7 / 4), (10, 10, 5 / 3)),
    "tree": ((6, 3, 3), (6, 3, 3)),
    "double_tree": ((9, 16, 2), (9, 16, 2)),
    "recursive_doubling": ((3, 3, 3), (4, 3, 3)),
    "halving_doubling": ((6, 6, 7 / 4), (6, 5, 5 / 2)),
    "hierarchical": ((8, 7, 5 / 2), (6, 5, 7 / 3)),
    "torus": ((8, 8, 7 / 4), (6, 6, 5 / 3)),
    "broadcast": ((3, 3, 3), (3, 3, 3)),
    "reduce": ((3, 1, 1), (3, 1, 1)),
    "scatter": ((3, 3, 7 / 8), (3, 3, 5 / 6)),
    "gather": ((3, 1, 4 / 8), (3, 1, 2 / 6)),
    "all_gather": ((7, 7, 7 / 8), (5, 5, 5 / 6)),
    "reduce_scatter": ((7, 7, 7 / 8), (5, 5, 5 / 6)),
    "all_to_all": ((7, 7, 7 / 64), (5, 5, 5 / 36)),
    "barrier": ((3, 3, 3), (3, 3, 3)),
}


@every_algorithm
def test_rounds_messages_and_bytes_match_the_papers(algorithm: Algorithm) -> None:
    for n, cost in zip((8, 6), COSTS[algorithm.name], strict=True):
        found = algorithm.rounds(n), algorithm.messages(n), algorithm.volume(n)
        assert found == pytest.approx(cost), f"{n} ranks"


@pytest.mark.parametrize("algorithm", ALL_REDUCES.values(), ids=ALL_REDUCES)
def test_no_all_reduce_beats_the_lower_bounds(algorithm: Algorithm) -> None:
    """Chan et al., 2007: each rank's data must be reduced and must reach all others."""
    for n in SIZES[1:]:
        assert algorithm.volume(n) >= 2 * (n - 1) / n - 1e-9
        # these use one round for messages between one rank and all others
        if algorithm.name not in {"flat", "reduce_broadcast"}:
            assert algorithm.rounds(n) >= np.ceil(np.log2(n))


# -- the catalog --------------------------------------------------------------------------


def test_catalog_is_displayed_as_a_table_and_unknown_names_raise() -> None:
    import distkit as dk

    assert dk.algorithms.ALL_REDUCES is ALL_REDUCES
    assert len(repr(ALL_REDUCES).splitlines()) == len(ALL_REDUCES)
    assert all(f"<code>{name}</code>" in ALL_REDUCES._repr_html_() for name in ALL_REDUCES)
    with pytest.raises(KeyError, match=r"unknown algorithm 'rings'; choose from .*ring"):
        ALL_REDUCES["rings"]
    with pytest.raises(AttributeError, match="no attribute 'ring'"):
        dk.algorithms.ring  # noqa: B018


@every_algorithm
def test_each_algorithm_has_a_reference_implementation(algorithm: Algorithm) -> None:
    doc = algorithm.reference.__doc__
    assert doc and "Source:" in doc
