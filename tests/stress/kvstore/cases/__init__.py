"""The parameter server under MXNet's semantics: small cases from its documentation and source.

Each checks the documented behaviour of a store, an optimizer or a Trainer of MXNet 1.9 in this
process; where MXNet asserts or is undefined, the case expects an error with a remedy. Unlike in
MXNet, numbers and strings may be keys of one store.
"""

from __future__ import annotations

import warnings
from importlib import import_module

from tests.stress.kvstore.cases.catalogue import CASES as CASES
from tests.stress.kvstore.cases.catalogue import Case as Case

INTERFACES = ("dense", "optimizers", "compressed", "devices", "trainer")

for _name in INTERFACES:
    import_module(f"{__name__}.{_name}")


def verdict(case: Case) -> str:
    """Run a case and return its error, or "". An unexpected warning is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            case.run()
        except Exception as e:
            return f"{type(e).__name__}: {e}"[:300]
    return ""
