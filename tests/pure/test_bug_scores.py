"""Scores of the bug suite, and the evaluation of torch's reports."""

from __future__ import annotations

from typing import Any

import pytest

from tests.stress.bugs.stock import MODES, Stock, read
from tests.stress.bugs.suite import TITLES, Case, Score, Verdict, cases, threads

SUITE = [*cases(), *threads()]

TIMED_OUT = "RuntimeError: [/x/gloo/unbound_buffer.cc:78] Timed out waiting 20000ms for recv"
LOST = "RuntimeError: [/x/gloo/pair.cc:553] Connection closed by peer [127.0.0.1]:652"
MISMATCH = "RuntimeError: Detected mismatch. Rank 0 is running collective: ALLREDUCE, but …"


def end(how: str, *errors: tuple[float, str], log: str = "") -> dict[str, Any]:
    return {"how": how, "barrier": False, "errors": errors, "log": log}


def verdict(case: Case, shown: str) -> Verdict:
    return Verdict(case, case.kinds[0] if case.kinds and shown else "", bool(shown), shown, 0.1)


# -- the score -----------------------------------------------------------------


def test_score_counts_reports_of_wrong_and_correct_programs() -> None:
    wrong, ok = (next(case for case in SUITE if case.ok is ok) for ok in (False, True))
    shown = [(wrong, "text"), (wrong, "text"), (wrong, "text"), (wrong, ""), (ok, "text"), (ok, "")]
    score = Score.of(verdict(case, text) for case, text in shown)
    assert score == Score(3, 1, 1, 1)
    assert (score.recall, score.specificity, score.precision) == (0.75, 0.5, 0.75)
    assert score.f1 == 0.75


def test_every_class_has_a_title() -> None:
    assert {case.cls for case in SUITE if not case.ok} == set(TITLES)


# -- torch's reports -------------------------------------------------------------


@pytest.mark.parametrize(
    ("ends", "how"),
    [
        ([end("returned"), end("returned")], "silent"),
        ([end("returned"), end("running")], "hang"),
        ([end("raised", (20.1, TIMED_OUT)), end("raised", (20.1, LOST))], "timeout"),
        ([end("raised", (0.1, LOST)), end("returned")], "error"),
        ([end("raised", (0.1, LOST)), end("raised", (20.1, TIMED_OUT))], "error"),
        ([end("raised", (20.1, MISMATCH)), end("raised", (20.1, TIMED_OUT))], "error"),
        ([end("signal 11"), end("running")], "error"),
    ],
)
def test_outcome_of_a_stock_run_is_classified(ends: list[dict[str, Any]], how: str) -> None:
    assert read(SUITE[0], ends, 20.0).how == how


@pytest.mark.parametrize("mode", MODES)
def test_saved_results_cover_the_suite(mode: str) -> None:
    assert len(Stock.load().verdicts(mode, SUITE)) == len(SUITE)
