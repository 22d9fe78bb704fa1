"""The parameter server by MXNet's semantics: small cases, from its documentation and source.

Each expects what MXNet 1.9 promises of a store, an optimizer or a Trainer, in this process; where
MXNet leaves the caller alone (an assert, undefined results) it expects an error with a remedy.
Two of MXNet's refusals are left out: here numbers and strings may be keys of one store, and
``row_sparse_pull`` may write to a dense tensor.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from importlib import import_module
from typing import Any

from benchmarks.figure import Figure, figure
from benchmarks.kvstore_cases.catalogue import CASES, Case

for _name in ("dense", "sparse", "optimizers", "compressed", "devices", "trainer"):
    import_module(f"benchmarks.kvstore_cases.{_name}")


def measure(reps: int, say: Callable[[str], None]) -> tuple[list[Figure], dict[str, Any]]:
    """The share of cases that hold, by interface, and what the others say."""
    verdicts = {case: verdict(case) for case in CASES}
    total, held = Counter[str](), Counter[str]()
    for case, wrong in verdicts.items():
        total[case.interface] += 1
        held[case.interface] += not wrong
        if wrong:
            say(f"kvstore_cases: {case.interface}: {case.name}: {wrong}")
    figures = [
        _figure(f"{name}: {held[name]} of {n} cases hold", held[name], n)
        for name, n in total.items()
    ]
    everything = _figure(
        f"all: {held.total()} of {total.total()} cases hold", held.total(), total.total()
    )
    wrongs = {f"{c.interface}: {c.name}": wrong for c, wrong in verdicts.items() if wrong}
    return [*figures, everything], {"wrong": wrongs}


def _figure(name: str, held: int, total: int) -> Figure:
    return figure(name, "% not held", [100 * (1 - held / total)], must=5, aim=0, absolute=True)


def verdict(case: Case) -> str:
    """What is wrong; empty if it holds. A warning that a case does not expect is wrong, too."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            case.run()
        except Exception as e:
            return f"{type(e).__name__}: {e}"[:300]
    return ""
