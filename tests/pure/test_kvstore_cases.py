"""The catalogue of what MXNet's users expect, as ``distkit bench kvstore_cases`` tries it."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks import kvstore_cases
from benchmarks.kvstore_cases.catalogue import CASES, Case


def one_of_each() -> list[Case]:
    """The last variant of each function: the rest is the benchmark's."""
    return list({(c.interface, c.name.partition(" [")[0]): c for c in CASES}.values())


@pytest.mark.parametrize("case", one_of_each(), ids=lambda c: f"{c.interface}: {c.name}")
def test_it_is_as_in_mxnet(case: Case) -> None:
    assert not kvstore_cases.verdict(case)


def test_the_catalogue_has_cases_of_every_interface() -> None:
    count = Counter(c.interface for c in CASES)
    assert count.keys() == {"dense", "sparse", "optimizers", "compressed", "devices", "trainer"}
    assert count.total() >= 230
    assert len({(c.interface, c.name) for c in CASES}) == len(CASES)


def test_a_case_that_does_not_hold_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong() -> None:
        raise AssertionError("it is otherwise")

    found: list[str] = []
    cases = [Case("dense", "a", lambda: None), Case("dense", "b", wrong)]
    monkeypatch.setattr(kvstore_cases, "CASES", cases)
    dense, everything = kvstore_cases.measure(1, found.append)[0]
    assert found == ["kvstore_cases: dense: b: AssertionError: it is otherwise"]
    assert (dense.value, everything.value, everything.reached) == (50, 50, "not reached")
