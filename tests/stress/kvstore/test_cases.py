"""All cases of MXNet's semantics; ``make test`` runs one variant of each."""

from __future__ import annotations

import pytest

from tests.stress.kvstore.cases import CASES, Case, verdict


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.interface}: {c.name}")
def test_store_behaves_like_mxnet(case: Case) -> None:
    assert not verdict(case)
