"""MXNet's semantics: one variant of each case of :mod:`tests.stress.kvstore.cases`."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.stress.kvstore.cases import CASES, INTERFACES, Case, verdict


@pytest.mark.parametrize(
    "case",
    # the last variant of each function
    {(c.interface, c.name.partition(" [")[0]): c for c in CASES}.values(),
    ids=lambda c: f"{c.interface}: {c.name}",
)
def test_store_behaves_like_mxnet(case: Case) -> None:
    assert not verdict(case)


def test_every_interface_has_cases() -> None:
    assert Counter(c.interface for c in CASES).keys() == {*INTERFACES}
    assert len({(c.interface, c.name) for c in CASES}) == len(CASES)


def test_failed_case_has_a_reason() -> None:
    def fail() -> None:
        raise AssertionError("values differ")

    assert verdict(Case("dense", "b", fail)) == "AssertionError: values differ"
