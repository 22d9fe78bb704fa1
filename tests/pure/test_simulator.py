"""The simulator: networks, stragglers, traces, training steps, invalid arguments."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from distkit.algorithms.all_reduce import ALL_REDUCES
from distkit.algorithms.rounds import Round, traffic
from distkit.events import Op
from distkit_parallel import PIPELINES
from distkit_simulation import (
    Link,
    Network,
    Stragglers,
    exponential,
    finish_times,
    lognormal,
    parameter_server,
    pipeline,
    simulate,
)
from distkit_simulation.network import carried_bytes
from distkit_simulation.simulator import matchings

NET = Network(Link(alpha=1e-5, beta=1e-9, gamma=1e-10))


FREE = Link(0, 0)
ONE = Link(alpha=0, beta=1)


# -- traces -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL_REDUCES)
def test_trace_has_the_messages_of_the_schedule(name: str) -> None:
    n, nbytes = 6, 4 * 1000
    algorithm = ALL_REDUCES[name]
    trace = simulate(name, n, nbytes, NET)
    messages, sent = traffic(algorithm.schedule(n), n, nbytes, algorithm.chunks(n), itemsize=4)
    found = Counter(m.src for m in trace.messages)
    assert [found[r] for r in range(n)] == messages.tolist()
    assert [sum(m.nbytes for m in trace.messages if m.src == r) for r in range(n)] == sent.tolist()
    assert all(m.send and m.recv and m.received > m.sent for m in trace.messages)
    assert trace.info.simulated is True
    adding = NET.link.gamma * nbytes  # computation after the last message has no event
    last = finish_times(name, n, nbytes, NET).max()
    assert last - adding * n <= trace.events[-1].time <= last
    assert not trace.diagnose()


@given(n=st.integers(1, 20), seed=st.integers(0, 99))
@settings(max_examples=20)
def test_finish_times_are_reproducible_and_bound_the_trace(n: int, seed: int) -> None:
    late = Stragglers(slow={0: 3.0}, jitter=exponential(1e-5))
    first = finish_times("halving_doubling", n, 4096, NET, stragglers=late, seed=seed)
    repeated = finish_times("halving_doubling", n, 4096, NET, stragglers=late, seed=seed)
    assert (first == repeated).all()
    trace = simulate("halving_doubling", n, 4096, NET, stragglers=late, seed=seed)
    assert trace.seconds <= first.max() + 1e-12
    assert n == 1 or trace.seconds > 0


# -- transfers ----------------------------------------------------------------------------------


def test_messages_of_a_rank_are_sequential() -> None:
    def star(n: int) -> list[Round]:
        others, root = np.arange(1, n), np.zeros(n - 1, int)
        return [Round(others, root, root, reduce=False), Round(root, others, root, reduce=False)]

    assert finish_times(star, 5, 4, Network(ONE), chunks=1).max() == 2 * 4 * 4


def test_transfer_waits_for_both_ranks() -> None:
    def one(n: int) -> list[Round]:
        zero = np.array([0])
        return [Round(zero, zero + 1, zero, reduce=False)]

    for start in ([5.0, 0.0, 0.0], [0.0, 5.0, 0.0]):
        assert finish_times(one, 3, 4, Network(ONE), start=start, chunks=1).tolist() == [9, 9, 0]


@given(st.integers(2, 12), st.integers(0, 10_000))
def test_matchings_contain_every_transfer_once(n: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    src = rng.integers(n, size=3 * n)
    dst = (src + rng.integers(1, n, size=3 * n)) % n
    parts = [np.arange(3 * n)[part] for part in matchings(src, dst, n)]
    assert sorted(np.concatenate(parts)) == list(range(3 * n))
    for part in parts:
        assert len(set(src[part])) == len(set(dst[part])) == len(part)


# -- networks -----------------------------------------------------------------------------------


def test_network_card_of_a_host_is_shared() -> None:
    network = Network.hosts(2, 4, inside=Link(0, 0.1), between=Link(0, 1))
    src, dst = np.array([0, 1, 2]), np.array([4, 5, 3])  # two messages leave host 0, one stays
    assert network.seconds(src, dst, [7, 7, 7]) == pytest.approx([14, 14, 0.7])


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 50)), min_size=1, max_size=20))
def test_bandwidth_is_shared_fairly(transfers: list[tuple[int, int]]) -> None:
    resource, m = (np.array(column) for column in zip(*transfers, strict=True))
    done = carried_bytes(resource, m.astype(float))
    for i, (mine, size) in enumerate(transfers):
        assert done[i] == sum(min(size, other) for r, other in transfers if r == mine)


# -- stragglers -----------------------------------------------------------------------------------


def test_slow_rank_delays_the_whole_ring() -> None:
    normal = finish_times("ring", 8, 8000, NET).max()
    slow = finish_times("ring", 8, 8000, NET, stragglers=Stragglers(slow={5: 3.0})).max()
    assert 2.5 * normal < slow <= 3 * normal


def test_jitter_is_reproducible() -> None:
    late = Stragglers(jitter=lognormal(1e-5, 1.0))
    first, repeated, other = (
        finish_times("ring", 8, 8000, NET, stragglers=late, seed=s).max() for s in (1, 1, 2)
    )
    assert first == repeated != other
    assert first > finish_times("ring", 8, 8000, NET).max()


# -- training steps ------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["gpipe", "1f1b"])
@given(stages=st.integers(1, 6), microbatches=st.integers(1, 9))
@settings(max_examples=25)
def test_pipeline_bubble_equals_the_formula(order: str, stages: int, microbatches: int) -> None:
    trace = pipeline(stages, microbatches, 1.0, 2.0, 0, Network(FREE), order=order)
    assert trace.seconds == pytest.approx(3 * (microbatches + stages - 1))
    assert len(trace.messages) == 2 * (stages - 1) * microbatches
    assert all(m.sent is not None and m.received is not None for m in trace.messages)
    assert 1 - 3 * microbatches / trace.seconds == pytest.approx(
        PIPELINES[order].bubble_fraction(stages, microbatches)
    )


@pytest.mark.parametrize("order", ["interleaved", "zero_bubble"])
@given(p=st.integers(1, 6), m=st.integers(1, 24), v=st.integers(1, 3))
@example(p=4, m=2, v=1)
@example(p=4, m=2, v=2)
@settings(max_examples=25)
def test_bubble_with_several_stages_per_rank_equals_the_formula(
    order: str, p: int, m: int, v: int
) -> None:
    """The examples include fewer micro-batches than ranks."""
    assume(m % max(1, m // p) == 0)
    trace = pipeline(p, m, 1.0, 2.0, 0, Network(FREE), order=order, chunks=v)
    assert trace.seconds / (3 * m) - 1 == pytest.approx(PIPELINES[order].bubble_ratio(p, m, v))
    assert len(trace.messages) == (2 * (p * v - 1) * m if p > 1 else 0)


@given(p=st.integers(1, 6), m=st.integers(1, 24))
@settings(max_examples=25)
def test_zero_bubble_with_twice_the_activations_has_no_idle_time(p: int, m: int) -> None:
    trace = pipeline(p, m, 1.0, 2.0, 0, Network(FREE), order="zero_bubble_h2")
    mine = [s for s in trace.spans if s.rank == 0 and s.op is Op.MARK and s.end is not None]
    duration = max(s.end or 0.0 for s in mine) - min(s.start for s in mine)
    assert duration / (3 * m) - 1 == pytest.approx(PIPELINES["zero_bubble_h2"].bubble_ratio(p, m))


def test_weight_gradients_fill_the_bubble() -> None:
    """Qi et al., 2024: ZB-H1 has a bubble of (p-1)(F + I - W)."""
    trace = pipeline(4, 8, 3.0, 5.0, 0, Network(FREE), order="zero_bubble", weights=1.0)
    assert trace.seconds == pytest.approx(8 * 8.0 + 3 * (3.0 + 4.0 - 1.0))


def test_blocking_sends_are_slower() -> None:
    network = Network(Link(0.5, 0.0))
    seconds = [
        pipeline(2, 4, 1.0, 1.0, 4, network, order="gpipe", overlap=overlap).seconds
        for overlap in (True, False)
    ]
    # three of four sends are hidden in each direction
    assert seconds == pytest.approx([11.0, 14.0])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, sum(1 / i for i in range(1, 11))),  # waits for all
        ({"staleness": math.inf}, 1.0),  # waits for none: ten gradients in the mean time of one
    ],
)
def test_parameter_server_steps_take_the_expected_time(options: dict, expected: float) -> None:
    run = parameter_server(
        10, [4], 1, FREE, exponential(1.0), steps=4000, record=False, seed=3, **options
    )
    tolerance = 0.1 if options.get("staleness") else 0.03  # the last worker ends late
    assert run.seconds / 4000 == pytest.approx(expected, rel=tolerance)


def test_waiting_decreases_with_staleness() -> None:
    waits = [
        parameter_server(
            8, [4], 1, FREE, exponential(1.0), steps=200, staleness=s, record=False
        ).waited.sum()
        for s in (0, 1, 2, 4, 8, math.inf)
    ]
    assert waits == sorted(waits, reverse=True)
    assert waits[-1] == 0


def test_staleness_is_bounded_or_about_the_number_of_other_workers() -> None:
    free = parameter_server(
        8, [4], 1, FREE, exponential(1.0), steps=500, staleness=math.inf, record=False
    )
    assert np.mean(free.staleness) == pytest.approx(7, abs=0.5)
    together = parameter_server(8, [4], 1, FREE, exponential(1.0), steps=50, record=False)
    assert set(together.staleness) == {0}
    bound = parameter_server(
        8, [4], 1, FREE, exponential(1.0), steps=500, staleness=2, record=False
    )
    assert max(bound.staleness) <= 7 * (2 * 2 + 1)


def test_messages_of_a_node_are_sequential() -> None:
    load, workers, servers = 1000, 12, 4
    run = parameter_server(workers, [load] * servers, servers, ONE, 0.0, record=False)
    once = workers * load  # each server sends and receives this much, concurrently
    assert once + load * servers <= run.seconds <= 2 * once + load * servers


# -- invalid arguments ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: simulate("ring", 0, 4, NET), "ranks must be at least 1; got 0"),
        (lambda: simulate("ring", -1, 4, NET), "ranks must be at least 1; got -1"),
        (lambda: simulate("circle", 4, 4, NET), "unknown algorithm 'circle': choose from .*ring"),
        (
            lambda: simulate("ring", 4, 6, NET),
            "nbytes must be a multiple of the element size 4; got 6",
        ),
        (lambda: simulate("ring", 4, -4, NET), "nbytes must not be negative; got -4"),
        (
            lambda: simulate("ring", 4, 4, Network.hosts(2, 4, ONE, ONE)),
            r"network \(2 hosts of 4 devices\) has 8 ranks, not 4: use a network of 4 ranks, "
            "or simulate 8 ranks$",
        ),
        (
            lambda: simulate("ring", 4, 4, NET, stragglers=Stragglers(slow={4: 2})),
            "rank 4 does not exist",
        ),
        (
            lambda: simulate("ring", 4, 4, NET, stragglers=Stragglers(slow={-1: 1})),
            "rank -1 does not exist",
        ),
        (lambda: simulate("ring", 1024, 4096, NET), "use finish_times"),
        (lambda: Network.hosts(0, 4, ONE, ONE), "at least one host"),
        (
            lambda: Stragglers(slow={0: 0.0}),
            "rank 0 must be finite and positive; got 0.0",
        ),
        (lambda: exponential(-1.0), "mean must be .*; got -1.0"),
        (lambda: pipeline(2, 0, 1, 1, 0, NET), "microbatches=0"),
        (lambda: pipeline(2, 1, 1, 1, 0, NET, order="zigzag"), "one of gpipe, 1f1b"),
        (lambda: pipeline(2, 2, 1, 1, 0, NET, chunks=2), "one stage per rank, not 2"),
        (
            lambda: parameter_server(0, [4], 1, ONE, 1.0),
            "workers and steps must be at least 1; got 0",
        ),
        (lambda: parameter_server(2, [4], 0, ONE, 1.0), "servers must be at least 1; got 0"),
        (
            lambda: parameter_server(3, [4], 1, ONE, 1.0, staleness=-1),
            "staleness must be .*; got -1",
        ),
    ],
)
def test_invalid_arguments_raise(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()  # type: ignore[operator]


@pytest.mark.parametrize(
    "call",
    [
        lambda network: simulate("ring", 4, 4, network),
        lambda network: finish_times("ring", 4, 4, network),
        lambda network: pipeline(2, 2, 1.0, 1.0, 4, network),
    ],
)
@pytest.mark.parametrize(
    ("network", "message"),
    [
        (ONE, r"not Link: use dk.simulation.Network\(the link\)"),
        (1e-6, r"not float: use dk.simulation.Network\(a dk.simulation.Link\)"),
    ],
)
def test_link_instead_of_a_network_raises(
    call: Callable[[object], object], network: object, message: str
) -> None:
    with pytest.raises(TypeError, match=message):
        call(network)
