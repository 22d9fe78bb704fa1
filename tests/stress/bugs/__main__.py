"""``python -m tests.stress.bugs [PATTERN ...]``: judge the programs, print what is wrong."""

from __future__ import annotations

import argparse
import re
import tempfile
from pathlib import Path
from statistics import median

from tests.stress.bugs.suite import Score, Verdict, cases, judge, right, threads


def main() -> None:
    """Run the chosen programs and print the score."""
    parser = argparse.ArgumentParser(prog="python -m tests.stress.bugs", description=__doc__)
    parser.add_argument("patterns", nargs="*", help="names or classes, as regular expressions")
    parser.add_argument("--show", action="store_true", help="print what is shown of each program")
    options = parser.parse_args()
    chosen = [
        case
        for case in [*cases(), *threads()]
        if not options.patterns
        or any(re.search(p, text) for p in options.patterns for text in (case.name, case.cls))
    ]
    verdicts = []
    with tempfile.TemporaryDirectory() as folder:
        for case in chosen:
            verdict = judge(case, Path(folder))
            verdicts.append(verdict)
            if verdict.wrong or options.show:
                print(f"{case.cls} · {case.name}: {'; '.join(verdict.wrong) or 'right'}")
                print("    " + verdict.shown.replace("\n", "\n    "))
    for title, some in (
        ("cases", [v for v in verdicts if v.case.cls != "thread"]),
        ("threads", [v for v in verdicts if v.case.cls == "thread"]),
    ):
        if some:
            print(f"{title}: {_summary(some)}")


def _summary(verdicts: list[Verdict]) -> str:
    score, seconds = Score.of(verdicts), [v.seconds for v in verdicts]
    parts = [
        f"recall {score.recall:.3f}",
        f"specificity {score.specificity:.3f}",
        f"F1 {score.f1:.3f}",
        *(f"{name} {count}" for name, count in right(verdicts).items()),
        f"wholly right {sum(not v.wrong for v in verdicts)} of {len(verdicts)}",
        f"explained in {median(seconds):.2f} s, slowest {max(seconds):.2f} s",
    ]
    return ", ".join(parts)


if __name__ == "__main__":
    main()
