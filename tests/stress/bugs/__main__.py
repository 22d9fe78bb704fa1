"""``python -m tests.stress.bugs [PATTERN ...]`` runs programs and prints the wrong reports.

``--stock`` runs plain torch instead, which takes about ten minutes. ``--page docs/bugs.md`` writes
the page.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from tests.stress.bugs.page import page
from tests.stress.bugs.stock import MODES, Stock, run_all
from tests.stress.bugs.suite import Case, Score, Verdict, cases, judge, right, themes, threads


def main() -> None:
    """Run the selected programs and print the score."""
    parser = argparse.ArgumentParser(prog="python -m tests.stress.bugs", description=__doc__)
    parser.add_argument("patterns", nargs="*", help="names or classes, as regular expressions")
    parser.add_argument("--show", action="store_true", help="print the report on each program")
    parser.add_argument(
        "--stock", action="store_true", help="run plain torch, and save its reports"
    )
    parser.add_argument("--page", type=Path, help="write the page docs/bugs.md")
    options = parser.parse_args()
    if options.page and options.patterns:
        parser.error("--page takes no patterns, because the page is about all programs")
    selected = [
        case
        for case in [*cases(), *threads(), *(themes() if options.patterns else ())]
        if not options.patterns
        or any(re.search(p, text) for p in options.patterns for text in (case.name, case.cls))
    ]
    if not selected:
        parser.error("no program matches the patterns")
    with tempfile.TemporaryDirectory() as folder:
        if options.stock:
            _run_torch(selected, Path(folder), all_of_them=not options.patterns)
        if options.page or not options.stock:
            verdicts = _judge_all(selected, Path(folder), options.show)
        if options.page:
            options.page.write_text(page(verdicts, Stock.load()), encoding="utf-8")


def _run_torch(selected: Sequence[Case], folder: Path, all_of_them: bool) -> None:
    stock = run_all(selected, folder)
    (stock if all_of_them else Stock.load().updated(stock)).save()
    for mode in MODES:
        verdicts = stock.verdicts(mode, selected)
        with_timeouts = [verdict.counting_timeouts() for verdict in verdicts]
        print(
            f"torch {stock.torch}, {mode}: {_score(Score.of(verdicts))}; "
            f"counting timeouts: {_score(Score.of(with_timeouts))}"
        )


def _judge_all(selected: Sequence[Case], folder: Path, show: bool) -> list[Verdict]:
    verdicts = []
    for case in selected:
        verdict = judge(case, folder)
        verdicts.append(verdict)
        if verdict.wrong or show:
            print(f"{case.cls} · {case.name}: {'; '.join(verdict.wrong) or 'right'}")
            print("    " + verdict.shown.replace("\n", "\n    "))
    for title, group in (
        ("cases", [v for v in verdicts if v.case.cls != "thread"]),
        ("threads", [v for v in verdicts if v.case.cls == "thread"]),
    ):
        if group:
            print(f"{title}: {_summary(group)}")
    return verdicts


def _score(score: Score) -> str:
    return f"recall {score.recall:.3f}, specificity {score.specificity:.3f}, F1 {score.f1:.3f}"


def _summary(verdicts: list[Verdict]) -> str:
    seconds = [v.seconds for v in verdicts if v.reported] or [0.0]
    parts = [
        _score(Score.of(verdicts)),
        *(f"{name} {count}" for name, count in right(verdicts).items()),
        f"entirely correct {sum(not v.wrong for v in verdicts)} of {len(verdicts)}",
        f"explained in {median(seconds):.2f} s, slowest {max(seconds):.2f} s",
    ]
    return ", ".join(parts)


if __name__ == "__main__":
    main()
