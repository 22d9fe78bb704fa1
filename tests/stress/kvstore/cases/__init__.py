"""The parameter server by MXNet's semantics: small cases, from its documentation and source.

Each expects what MXNet 1.9 promises of a store, an optimizer or a Trainer, in this process; where
MXNet leaves the caller alone (an assert, undefined results) it expects an error with a remedy.
One of MXNet's refusals is left out: here numbers and strings may be keys of one store.
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
    """What is wrong; empty if it holds. A warning that a case does not expect is wrong, too."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            case.run()
        except Exception as e:
            return f"{type(e).__name__}: {e}"[:300]
    return ""
