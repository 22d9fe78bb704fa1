"""MXNet's semantics: one variant of each case of :mod:`tests.stress.kvstore.cases`."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.stress.kvstore.cases import CASES, INTERFACES, Case, verdict


def one_of_each() -> list[Case]:
    """The last variant of each function."""
    return list({(c.interface, c.name.partition(" [")[0]): c for c in CASES}.values())


@pytest.mark.parametrize("case", one_of_each(), ids=lambda c: f"{c.interface}: {c.name}")
def test_a_store_does_what_mxnets_does(case: Case) -> None:
    assert not verdict(case)


def test_there_are_cases_of_every_interface() -> None:
    count = Counter(c.interface for c in CASES)
    assert count.keys() == {*INTERFACES}
    assert len({(c.interface, c.name) for c in CASES}) == len(CASES)


def test_a_case_that_does_not_hold_says_why() -> None:
    def wrong() -> None:
        raise AssertionError("it is otherwise")

    assert verdict(Case("dense", "b", wrong)) == "AssertionError: it is otherwise"
