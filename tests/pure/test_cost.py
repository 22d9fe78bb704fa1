"""Closed-form costs, compared with the simulator, the catalog and the lower bounds."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from distkit.algorithms.all_reduce import ALL_REDUCES
from distkit.algorithms.all_reduce.torus import columns
from distkit_simulation import (
    Link,
    Network,
    cost,
    finish_times,
    parameter_server,
)
from distkit_simulation.calibration import fit

double_tree, torus = partial(cost.all_reduce, "double_tree"), partial(cost.all_reduce, "torus")
LINKS = st.builds(
    Link,
    st.floats(0, 1e-3),
    st.floats(1e-11, 1e-7),
    st.just(0.0) | st.floats(0, 1e-11),  # adding is at least as fast as sending
)
SWITCHED = st.builds(
    Link,
    st.floats(0, 1e-3),
    st.floats(1e-11, 1e-7),
    switches=st.just(((4096.0, 3e-4, 2e-10), (1e6, 1e-3, 1e-10))),
)


def divisible_size(n: int) -> int:
    """Return a message size that every algorithm can divide into chunks on n ranks."""
    return 4 * n * -(-n // 2) * 2 ** n.bit_length() * 8


@pytest.mark.parametrize("name", sorted(set(ALL_REDUCES) - {"double_tree"}))
@settings(max_examples=30)
@given(n=st.integers(1, 33), link=LINKS | SWITCHED, times=st.integers(1, 1000))
def test_closed_form_equals_the_simulation(name: str, n: int, link: Link, times: int) -> None:
    nbytes = divisible_size(n) * times
    simulated = finish_times(name, n, nbytes, Network(link)).max()
    assert simulated == pytest.approx(cost.all_reduce(name, n, nbytes, link), rel=1e-9, abs=1e-18)


@settings(max_examples=30)
@given(n=st.integers(2, 64), link=LINKS, segments=st.integers(1, 8))
@example(n=21, link=Link(0.0, 1e-8), segments=8)  # the order of messages matters here
@example(n=8, link=Link(1.0, 0.0), segments=8)
def test_double_tree_formula_is_an_upper_bound(n: int, link: Link, segments: int) -> None:
    nbytes = 8 * segments * 100
    simulated = finish_times("double_tree", n, nbytes, Network(link), segments=segments).max()
    assert 0.249 < simulated / double_tree(n, nbytes, link, segments=segments) <= 1 + 1e-9


@settings(max_examples=40)
@given(k=st.integers(1, 5), g=st.sampled_from([1, 2, 4, 8]), link=LINKS)
def test_torus_formula_equals_the_simulation_for_any_host_size(k: int, g: int, link: Link) -> None:
    n, nbytes = g * k, divisible_size(g * k)
    simulated = finish_times("torus", n, nbytes, Network(link), devices_per_host=g).max()
    form = torus(n, nbytes, link, devices_per_host=g)
    assert simulated == pytest.approx(form, rel=1e-9, abs=1e-18)


def value(formula: str, **names: float) -> float:
    """Evaluate a formula of the catalog; adjacent factors are multiplied."""
    text = formula.removeprefix("at most ").partition(",")[0]
    text = re.sub(r"⌈?lg n⌉?", "l", text)
    tokens = re.findall(r"\d+|[a-zA-Zαβγ]|[-+/()]", text)
    code = tokens[0]
    for before, token in pairwise(tokens):
        times = before not in "-+/(" and token not in "-+/)"
        code += "*" * times + token
    return float(eval(code, {"__builtins__": {}}, names))


@pytest.mark.parametrize("name", ALL_REDUCES)
@given(n=st.sampled_from([2, 4, 8, 16, 64]), size=st.integers(0, 10**6), link=LINKS)
def test_catalog_formula_equals_the_closed_form(name: str, n: int, size: int, link: Link) -> None:
    """Powers of two only: lg n is an integer, and no rank is folded."""
    g = columns(n) if name == "torus" else 2
    computed = value(
        ALL_REDUCES[name].cost,
        n=n,
        K=size,
        l=math.log2(n),
        g=g,
        m=n / g,
        S=4 if name == "double_tree" else 2,
        α=link.alpha,
        β=link.beta,
        γ=link.gamma,
    )
    assert computed == pytest.approx(cost.all_reduce(name, n, size, link), rel=1e-9, abs=1e-18)


@pytest.mark.parametrize("name", ALL_REDUCES)
@settings(max_examples=20)
@given(n=st.integers(1, 70), link=LINKS, units=st.integers(0, 50))
def test_no_algorithm_beats_the_lower_bound(name: str, n: int, link: Link, units: int) -> None:
    nbytes = divisible_size(n) * units
    simulated = finish_times(name, n, nbytes, Network(link)).max()
    assert simulated >= cost.lower_bound(n, nbytes, link) * (1 - 1e-9)


def test_formulas_accept_arrays() -> None:
    n, nbytes = np.array([[2], [4], [7]]), np.array([1e3, 1e6])
    for name, times in cost.table(n, nbytes, Link(1e-6, 1e-9, 1e-10)).items():
        assert times.shape == (3, 2)
        assert times[2, 1] == cost.all_reduce(name, 7, 1e6, Link(1e-6, 1e-9, 1e-10))


def test_crossover_is_the_size_of_equal_cost() -> None:
    link = Link(1e-5, 1e-9, 1e-10)
    found = cost.crossovers(16, link)
    assert len(found) > 1
    for (_, before), (nbytes, after) in pairwise(found):
        times = [cost.all_reduce(name, 16, nbytes, link) for name in (before, after)]
        assert times[0] == pytest.approx(times[1], rel=1e-3)


@given(
    sync=st.floats(0.001, 10),
    compute=st.floats(0.01, 10),
    buckets=st.integers(1, 16),
)
def test_exposed_time_equals_the_simulated_buckets(
    sync: float, compute: float, buckets: int
) -> None:
    """Compare with a step simulated bucket by bucket; its all-reduces take ``sync`` in total."""
    forward, backward = compute / 3, compute * 2 / 3
    end = 0.0
    for bucket in range(1, buckets + 1):
        ready = forward + backward * bucket / buckets
        end = max(end, ready) + sync / buckets
    assert end == pytest.approx(compute + cost.exposed(sync, backward, buckets), rel=1e-9)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: cost.ring(0, 8, Link(1, 1)), "0 ranks: expected 1"),
        (lambda: cost.ring(4, -8, Link(1, 1)), "-8 bytes: expected 0"),
        (lambda: cost.ring(math.nan, 8, Link(1, 1)), "nan ranks"),
        (lambda: cost.all_reduce("circle", 4, 8, Link(1, 1)), "no cost formula for 'circle'"),
        (lambda: cost.parameter_server(4, 0, 8, Link(1, 1)), "0 servers"),
        (lambda: cost.exposed(1, 1, 0), "0 buckets"),
        (lambda: Link(-1e-6, 1e-9), r"alpha \[s\] must be .*; got -1e-06"),
        (lambda: Link(0, math.inf), r"beta \[s/byte\] must be .*; got inf"),
        (
            lambda: Link(5e-6, 12.5e9),
            r"beta \[s/byte\] is probably a bandwidth; got 1.25e.10. Use 1/1.25e",
        ),
        (
            lambda: Link(0, 0, switches=((2.0, 0, 1e9),)),
            r"switches\[0\] beta \[s/byte\] is probably a bandwidth; got 1e.09",
        ),
        (
            lambda: torus(8, 8, Link(1, 1), devices_per_host=3),
            "a divisor of the number of ranks, 8; got 3",
        ),
        (lambda: Link.of(1e-6, -1e9), "bandwidth must be positive; got -1000000000.0"),
        (lambda: Link.of(1e-6, 0), "bandwidth must be positive; got 0"),
        (lambda: Link(0, 0, switches=((2.0, 0, 0), (1.0, 0, 0))), "ascending order"),
        (lambda: Link(0, 0, switches=((2.0, 0, -1),)), r"switches\[0\] beta .*; got -1"),
        (lambda: fit({4: [1.0]}), "two sizes"),
    ],
)
def test_invalid_arguments_raise(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()  # type: ignore[operator]


@pytest.mark.parametrize(
    "call",
    [
        partial(cost.all_reduce, "torus"),
        cost.ring,
        cost.lower_bound,
        lambda n, nbytes, link: cost.table(n, nbytes, link),
        lambda n, nbytes, link: cost.parameter_server(n, 2, nbytes, link),
        lambda n, nbytes, link: parameter_server(n, [nbytes], 2, link, 1.0),
    ],
)
@pytest.mark.parametrize(
    ("link", "message"),
    [
        (
            Network(Link(1e-6, 1e-9)),
            r"a dk.simulation.Link, not Network: pass network.link",
        ),
        (1e-6, r"not float: pass dk.simulation.Link\(alpha, beta\)"),
    ],
)
def test_network_instead_of_a_link_raises(
    call: Callable[..., object], link: object, message: str
) -> None:
    with pytest.raises(TypeError, match=message):
        call(4, 1000, link)


# -- fitting --------------------------------------------------------------------------------


@settings(max_examples=30, derandomize=True)
@given(st.floats(1e-6, 1e-3), st.floats(1e-10, 1e-8), st.integers(0, 2**32 - 1))
def test_fit_recovers_alpha_and_beta_from_noisy_times(alpha: float, beta: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    sizes = [4, 2**10, 2**14, 2**17, 2**20, 2**23]
    noisy = {m: ((alpha + beta * m) * rng.uniform(0.98, 1.02, 9)).tolist() for m in sizes}
    found = fit(noisy, {m: [m * 1e-11] * 9 for m in sizes})
    assert found.link.alpha == pytest.approx(alpha, rel=0.1)
    assert found.link.beta == pytest.approx(beta, rel=0.25)
    assert found.link.gamma == pytest.approx(1e-11)
    assert found.alpha[0] <= found.link.alpha <= found.alpha[1]


def test_fitted_costs_are_not_negative() -> None:
    falling = fit({4: [5e-5], 1000: [4e-5], 100_000: [3e-5]})
    assert "no bandwidth found" in str(falling)
    assert (falling.link.beta, falling.link.alpha > 0) == (0.0, True)
    assert fit({1000: [1e-9], 2000: [1e-8], 100_000: [1e-3]}).link.alpha == 0.0
