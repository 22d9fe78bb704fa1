"""The bug suite's scores, the evaluation of torch's reports, and the page."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.stress.bugs.page import EXAMPLES, page
from tests.stress.bugs.stock import MODES, Stock, StockReport, explains, read
from tests.stress.bugs.suite import TITLES, Case, Score, Verdict, cases, threads

SUITE = [*cases(), *threads()]
SOME = [case for case in SUITE if case.name in EXAMPLES or case.ok]

TIMED_OUT = "RuntimeError: [/x/gloo/unbound_buffer.cc:78] Timed out waiting 20000ms for recv"
LOST = "RuntimeError: [/x/gloo/pair.cc:553] Connection closed by peer [127.0.0.1]:652"
MISMATCH = "RuntimeError: Detected mismatch. Rank 0 is running collective: ALLREDUCE, but …"


def end(how: str, *errors: tuple[float, str], log: str = "") -> dict[str, Any]:
    return {"how": how, "barrier": False, "errors": errors, "log": log}


def verdict(case: Case, shown: str) -> Verdict:
    return Verdict(case, case.kinds[0] if case.kinds and shown else "", bool(shown), shown, 0.1)


def stock(report: StockReport) -> Stock:
    rows = {case.name: replace(report, source=read(case, [], 1.0).source) for case in SUITE}
    return Stock("2.13.0", "2026-08-01", 20.0, {mode: rows for mode in MODES})


# -- the score -----------------------------------------------------------------


def test_score_counts_reports_of_wrong_and_of_right_programs() -> None:
    wrong, ok = (next(case for case in SUITE if case.ok is ok) for ok in (False, True))
    shown = [(wrong, "text"), (wrong, "text"), (wrong, "text"), (wrong, ""), (ok, "text"), (ok, "")]
    score = Score.of(verdict(case, text) for case, text in shown)
    assert score == Score(3, 1, 1, 1)
    assert (score.recall, score.specificity, score.precision) == (0.75, 0.5, 0.75)
    assert score.f1 == 0.75


def test_every_class_has_a_title() -> None:
    assert {case.cls for case in SUITE if not case.ok} == set(TITLES)


# -- what torch says ---------------------------------------------------------------


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
def test_connection_closed_by_a_timeout_counts_as_timeout(
    ends: list[dict[str, Any]], how: str
) -> None:
    assert read(SUITE[0], ends, 20.0).how == how


@pytest.mark.parametrize(
    ("says", "text", "explained"),
    [
        ("order", TIMED_OUT, False),
        ("closed|recv|buffer", LOST, False),
        ("closed|recv|buffer", TIMED_OUT, False),
        ("order", MISMATCH, True),
        ("order", "RuntimeError: [Rank 0]: Ranks 1, 2 failed to pass monitoredBarrier", True),
        ("shape", "SIGABRT: op.preamble.length <= op.nbytes. 8 vs 4.", True),
        ("gather_list", "ValueError: Argument ``gather_list`` must be specified", True),
        ("pair", "RuntimeError: [/x/gloo/pair.cc:553] broken", False),
        ("", "RuntimeError: Tag must be nonnegative", True),
        ("", "", False),
    ],
)
def test_text_that_names_the_difference_explains(says: str, text: str, explained: bool) -> None:
    assert explains(replace(SUITE[0], says=(says,)), text) is explained


def test_changed_program_needs_a_new_answer() -> None:
    changed = replace(SUITE[0], text=SUITE[0].text + "\n")
    with pytest.raises(LookupError, match=r"--stock"):
        stock(StockReport("silent", "", (), False, 0)).verdicts("plain", [changed])


# -- the page ----------------------------------------------------------------------


def test_page_lists_scores_classes_examples_and_failures() -> None:
    shown = {case.name: " ".join([*case.marked, "root"]) for case in SOME if not case.ok}
    text = page(
        [verdict(case, shown.get(case.name, "")) for case in SOME],
        stock(StockReport("timeout", TIMED_OUT, (), False, 0)),
    )
    rights = sum(case.ok for case in SOME)
    assert f"| **distkit** | {len(EXAMPLES)} | 1.000 | 1.000 | 1.000 |" in text
    assert "| torch, plain | 0 | 0.000 | 1.000 | 0.000 |" in text
    assert "| – a timeout is a report | 3 | 1.000 | 0.000 |" in text
    assert "| MUST | 0.847 | 0.888 | 0.869 |" in text
    assert f"| {TITLES['param/root']} | 1 | 1 | 1 | 1 |" in text
    assert f"| Right programs | {rights} | 0 |" in text
    assert "dist.all_reduce(x)" in text and "Timed out" in text
    assert "- `op_all_reduce`: no match for" in text


@pytest.mark.parametrize("mode", MODES)
def test_saved_answers_match_the_suite(mode: str) -> None:
    assert len(Stock.load().verdicts(mode, SUITE)) == len(SUITE)
