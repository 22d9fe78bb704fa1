"""The parameter server has MXNet's semantics: small cases from MXNet's documentation and source.

Each case checks the documented behavior of a store, an optimizer or a Trainer of MXNet 1.9 in this
process. Where MXNet fails an assertion or its behavior is undefined, the case expects an error with
a remedy. Unlike in MXNet, a store can have both numbers and strings as keys.
"""

from __future__ import annotations

import warnings
from importlib import import_module

from tests.stress.kvstore.cases.catalog import CASES as CASES
from tests.stress.kvstore.cases.catalog import Case as Case

INTERFACES = ("dense", "optimizers", "compressed", "devices", "trainer")

for _name in INTERFACES:
    import_module(f"{__name__}.{_name}")


def verdict(case: Case) -> str:
    """Run a case and return its error, or "". Unexpected warnings are errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            case.run()
        except Exception as e:
            return f"{type(e).__name__}: {e}"[:300]
    return ""
