"""Schedules, proved by counting whose contributions each rank holds."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distkit.algorithms import schedules
from distkit.algorithms.catalogue import ALL_REDUCES, COLLECTIVES, Algorithm
from distkit.algorithms.schedules import Round, held, ring, traffic

SIZES = [*range(1, 65)]
everything = pytest.mark.parametrize(
    "algorithm", [*ALL_REDUCES.values(), *COLLECTIVES.values()], ids=lambda a: a.name
)


def one_hot(n: int) -> np.ndarray:
    return np.eye(n, dtype=int)


# -- correct -------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ALL_REDUCES.values(), ids=ALL_REDUCES)
def test_an_all_reduce_leaves_every_contribution_once_everywhere(algorithm: Algorithm) -> None:
    for n in SIZES:
        have = held(algorithm.schedule(n), n, algorithm.chunks(n))
        assert (have == 1).all(), f"{n} ranks"


@settings(max_examples=40)
@given(st.integers(1, 16), st.integers(1, 7))
def test_options_of_an_all_reduce(n: int, option: int) -> None:
    for name in ("pipelined_ring", "double_tree"):
        a, how = ALL_REDUCES[name], {"segments": option}
        assert (held(a.schedule(n, **how), n, a.chunks(n, **how)) == 1).all()
    for name, ranks in ("hierarchical", n), ("torus", n * option):
        a, how = ALL_REDUCES[name], {"devices_per_host": option}
        assert (held(a.schedule(ranks, **how), ranks, a.chunks(ranks, **how)) == 1).all()


@settings(max_examples=40)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.randoms())
def test_hosts_may_have_any_ranks_and_any_number_of_them(sizes: list[int], random: Random) -> None:
    ranks = [*range(sum(sizes))]
    random.shuffle(ranks)
    hosts = [[ranks.pop() for _ in range(size)] for size in sizes]
    for name in ("hierarchical", "torus"):
        a, n = ALL_REDUCES[name], sum(sizes)
        have = held(a.schedule(n, hosts=hosts), n, a.chunks(n, hosts=hosts))
        assert (have == 1).all(), name


@pytest.mark.parametrize("hosts", [[[0, 1]], [[0, 1], [1, 2]], [[0, 1, 2], []], [[0, 1, 2, 3]]])
def test_each_rank_has_a_place_on_one_host(hosts: list[list[int]]) -> None:
    for schedule in (schedules.hierarchical, schedules.torus):
        with pytest.raises(ValueError, match="give each of 3 ranks a place on one host"):
            next(schedule(3, hosts=hosts))


def test_a_torus_has_no_gaps() -> None:
    with pytest.raises(ValueError, match="7 ranks do not fill hosts of 2"):
        next(schedules.torus(7, devices_per_host=2))


@given(st.integers(1, 64), st.data())
def test_one_to_all_and_back(n: int, data: st.DataObject) -> None:
    root = data.draw(st.integers(0, n - 1))
    ranks, places = np.arange(n), (np.arange(n) + root) % n  # place i is rank places[i]
    have = held(schedules.broadcast(n, root), n, 1)
    assert np.array_equal(have[:, 0], np.tile(one_hot(n)[root], (n, 1)))
    assert (held(schedules.reduce(n, root), n, 1)[root] == 1).all()
    have = held(schedules.scatter(n, root), n)
    assert np.array_equal(have[places, ranks], np.tile(one_hot(n)[root], (n, 1)))
    have = held(schedules.gather(n, root), n)
    assert np.array_equal(have[root], one_hot(n)[places])


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 8, 13, 16, 24])
def test_all_to_all_and_its_like(n: int) -> None:
    r = np.arange(n)
    assert (held(schedules.all_gather(n), n) == one_hot(n)).all()
    assert (held(schedules.reduce_scatter(n), n)[r, r] == 1).all()
    have = held(schedules.all_to_all(n), n, n * n).reshape(n, n, n, n)  # rank, from, to, whose
    assert all(np.array_equal(have[i, :, i], one_hot(n)) for i in r)
    assert (held(schedules.barrier(n), n, 1) > 0).all()  # everybody has heard of everybody


def test_gossip_is_no_all_reduce() -> None:
    have = held(schedules.gossip(6), 6, 1)[:, 0]
    assert have[0].tolist() == [1, 1, 0, 0, 0, 1]  # the neighbours', nobody else's
    have = held(schedules.gossip(6, rounds=3), 6, 1)[:, 0]
    assert have.min() > 0 and len(set(have[0].tolist())) > 1  # everybody's, unequally


def test_a_missing_or_doubled_round_is_noticed() -> None:
    assert not (held(list(ring(4))[:-1], 4) == 1).all()
    assert held([*ring(4), next(ring(4))], 4).max() == 2
    assert np.array_equal(held([], 3)[0, 0], [1, 0, 0])


def test_a_round_that_contradicts_itself_is_refused() -> None:
    two, one = np.array([1, 2]), np.array([0, 0])
    for reduce in (False, np.array([True, False])):
        with pytest.raises(ValueError, match="round 0 replaces a chunk"):
            held([Round(two, one, one, reduce)], 3)
    assert held([Round(two, one, one, reduce=True)], 3)[0, 0].tolist() == [1, 1, 1]


# -- as cheap as stated --------------------------------------------------------------------


@everything
def test_rounds_messages_and_bytes_are_those_stated(algorithm: Algorithm) -> None:
    """The busiest rank sends what the catalogue says, to the byte."""
    for n in SIZES if algorithm.name != "all_to_all" else SIZES[:20]:
        chunks = algorithm.chunks(n)
        messages, sent = traffic(algorithm.schedule(n), n, 24 * chunks, chunks)
        size = 24 * chunks if algorithm.name != "barrier" else 0
        assert len(list(algorithm.schedule(n))) == algorithm.rounds(n), f"{n} ranks"
        assert messages.max() == algorithm.messages(n), f"{n} ranks"
        assert sent.max() == pytest.approx(size * algorithm.volume(n)) or size == 0, f"{n} ranks"


@pytest.mark.parametrize("algorithm", ALL_REDUCES.values(), ids=ALL_REDUCES)
def test_no_all_reduce_beats_the_lower_bounds(algorithm: Algorithm) -> None:
    """Chan et al., 2007: each rank's data must reach everybody, and leave it at least once."""
    for n in SIZES[1:]:
        assert algorithm.volume(n) >= 2 * (n - 1) / n - 1e-9
        if algorithm.name not in {"flat", "reduce_broadcast"}:  # these talk to all at once
            assert algorithm.rounds(n) >= np.ceil(np.log2(n))


@everything
def test_every_round_says_who_does_what(algorithm: Algorithm) -> None:
    for n in SIZES[:20]:
        chunks = algorithm.chunks(n)
        for t in algorithm.schedule(n):
            src, dst, chunk, reduce = t.pieces()
            assert len(t.src) == len(t.dst) == len(t.chunk) > 0
            assert len(src) == len(dst) == len(chunk) == len(reduce) >= len(t.src)
            assert (src != dst).all() and 0 <= src.min() and src.max() < n
            assert 0 <= dst.min() and dst.max() < n
            assert 0 <= chunk.min() and chunk.max() < chunks


@given(st.integers(1, 29), st.integers(0, 100), st.sampled_from([1, 2, 4, 8]))
def test_traffic_counts_what_is_there(n: int, length: int, itemsize: int) -> None:
    """Chunks are those of tensor_split, and elements are never cut."""
    messages, sent = traffic(ring(n), n, length * itemsize, itemsize=itemsize)
    assert (messages == 2 * (n - 1)).all()
    assert sent.sum() == 2 * (n - 1) * length * itemsize
    assert (sent % itemsize == 0).all()


@given(st.integers(0, 100), st.integers(1, 30))
def test_chunks_are_torchs(length: int, chunks: int) -> None:
    import torch

    sizes = [len(part) for part in torch.empty(length).tensor_split(chunks)]
    assert schedules.chunk_sizes(length, chunks).tolist() == sizes


# -- the catalogue --------------------------------------------------------------------------


def test_the_catalogue_is_a_table() -> None:
    import distkit as dk

    assert dk.algorithms.ALL_REDUCES is ALL_REDUCES
    assert len(repr(ALL_REDUCES).splitlines()) == len(ALL_REDUCES)
    assert all(f"<code>{name}</code>" in ALL_REDUCES._repr_html_() for name in ALL_REDUCES)
    with pytest.raises(KeyError, match="no algorithm 'rings'; there are reduce_broadcast, flat"):
        ALL_REDUCES["rings"]
    with pytest.raises(AttributeError, match="no attribute 'ring'"):
        dk.algorithms.ring  # noqa: B018


@everything
def test_each_algorithm_has_a_page(algorithm: Algorithm) -> None:
    page = algorithm.page
    assert page.__doc__ and "Source:" in page.__doc__
    assert page.__name__ in {f"{algorithm.name}_all_reduce", algorithm.name, "gossip_average"}
