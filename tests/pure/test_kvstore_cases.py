"""MXNet's semantics: one variant of each case of :mod:`tests.stress.kvstore.cases`."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.stress.kvstore.cases import CASES, INTERFACES, Case, verdict


def one_of_each() -> list[Case]:
    """Return the last variant of each function."""
    return list({(c.interface, c.name.partition(" [")[0]): c for c in CASES}.values())


@pytest.mark.parametrize("case", one_of_each(), ids=lambda c: f"{c.interface}: {c.name}")
def test_store_behaves_as_mxnets(case: Case) -> None:
    assert not verdict(case)


def test_every_interface_has_cases() -> None:
    count = Counter(c.interface for c in CASES)
    assert count.keys() == {*INTERFACES}
    assert len({(c.interface, c.name) for c in CASES}) == len(CASES)


def test_failed_case_gives_a_reason() -> None:
    def wrong() -> None:
        raise AssertionError("it is otherwise")

    assert verdict(Case("dense", "b", wrong)) == "AssertionError: it is otherwise"
