"""All cases of MXNet's semantics; `make test` has one of each function."""

from __future__ import annotations

import pytest

from tests.stress.kvstore.cases import CASES, Case, verdict


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.interface}: {c.name}")
def test_a_store_does_what_mxnets_does(case: Case) -> None:
    assert not verdict(case)
