"""Writes ``docs/bugs.md``: what distkit and torch report about the same programs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from textwrap import dedent

from tests.stress.bugs.stock import MODES, Stock, StockReport, StockVerdict
from tests.stress.bugs.suite import MARK, TITLES, Judged, Score, Verdict, right

#: Scores of tools that check MPI programs, from the README of the Initiative's repository.
PUBLISHED = {
    "MUST": Score(83, 10, 79, 15),
    "McSimGrid": Score(77, 16, 76, 17),
    "Aislinn": Score(64, 16, 64, 20),
    "ISP": Score(69, 32, 70, 20),
    "CIVL": Score(13, 28, 18, 1),
    "PARCOACH": Score(18, 8, 80, 90),
}

#: Programs shown with their reports.
EXAMPLES = {
    "coll_missing_all_reduce": "One rank does not call a collective",
    "root_broadcast": "Different roots",
    "op_all_reduce": "Different reductions: the result is wrong",
}


def page(verdicts: Sequence[Verdict], stock: Stock) -> str:
    """Render the page.

    Args:
        verdicts: distkit's verdicts on the programs.
        stock: torch's reports about them.

    Raises:
        LookupError: torch has no saved report about one of the programs.
    """
    cases = [verdict.case for verdict in verdicts]
    torch = {mode: stock.verdicts(mode, cases) for mode in MODES}
    barrier = torch["monitored_barrier"]
    explained = [verdict.case for verdict in verdicts if not verdict.wrong]
    template = Path(__file__).with_suffix(".md").read_text(encoding="utf-8")
    return template.format(
        wrong=sum(not case.ok for case in cases),
        right=sum(case.ok for case in cases),
        short=sum(case.cls != "thread" for case in cases),
        threads=sum(case.cls == "thread" for case in cases),
        all=len(cases),
        explained=len(explained),
        explained_threads=sum(case.cls == "thread" for case in explained),
        reached=sum(v.report.barrier and not v.case.ok for v in barrier),
        torch=stock.torch,
        date=stock.date,
        timeout=stock.timeout,
        half=stock.timeout / 2,
        scores=_scores(verdicts, torch),
        alarms=_alarms(torch),
        published=_published(),
        classes=_classes(verdicts, torch),
        examples="\n".join(_example(v, torch) for v in verdicts if v.case.name in EXAMPLES),
        failures=_failures(verdicts),
    )


def _table(head: Sequence[str], rows: Iterable[Sequence[object]], numbers: bool = True) -> str:
    lines = [head, ["---"] + ["---:" if numbers else "---"] * (len(head) - 1), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def _scores(verdicts: Sequence[Verdict], torch: dict[str, list[StockVerdict]]) -> str:
    counts = right(verdicts)
    rows = [_score("**distkit**", verdicts, counts["line"], counts["remedy"])]
    for mode, stock in torch.items():
        rows.append(_stock_score(f"torch, {mode}", stock))
        timeouts = [verdict.counting_timeouts() for verdict in stock]
        rows.append(_stock_score("– counting timeouts as reports", timeouts))
    head = ["", "reported", "recall", "specificity", "F1", "lines", "explained"]
    return _table(head, rows)


def _stock_score(name: str, verdicts: Sequence[StockVerdict]) -> list[object]:
    found = [v for v in verdicts if v.reported and not v.case.ok]
    lines = sum(v.right_line for v in found)
    return _score(name, verdicts, lines, sum(v.explained for v in found))


def _score(name: str, verdicts: Sequence[Judged], lines: int, explained: int) -> list[object]:
    score = Score.of(verdicts)
    return [name, score.true_positives, *_shares(score), lines, explained]


def _shares(score: Score) -> list[str]:
    return [f"{share:.3f}" for share in (score.recall, score.specificity, score.f1)]


def _alarms(torch: dict[str, list[StockVerdict]]) -> str:
    return "".join(
        f"- With torch's {mode}, these correct programs fail, which counts as false positives: "
        + ", ".join(f"`{v.case.name}` (`{v.report.text.splitlines()[0]}`)" for v in alarms)
        + ".\n"
        for mode, stock in torch.items()
        if (alarms := [v for v in stock if v.case.ok and v.reported])
    )


def _published() -> str:
    rows = [[name, *_shares(score)] for name, score in PUBLISHED.items()]
    return _table(["", "recall", "specificity", "F1"], rows)


def _classes(verdicts: Sequence[Verdict], torch: dict[str, list[StockVerdict]]) -> str:
    rows = []
    for cls, title in TITLES.items():
        some = [v for v in verdicts if v.case.cls == cls and not v.case.ok]
        counts = right(some)
        found = [counts[key] for key in ("reported", "line", "kind", "remedy")]
        reports = [
            _three(v for v in stock if v.case.cls == cls and not v.case.ok)
            for stock in torch.values()
        ]
        rows.append([title, len(some), *found, *reports])
    right_ones = [v for v in verdicts if v.case.ok]
    rows.append(
        ["Correct programs", len(right_ones), sum(v.reported for v in right_ones), "", "", ""]
        + [_three((v for v in stock if v.case.ok), "–") for stock in torch.values()]
    )
    head = ["", "programs", "distkit: reported", "lines", "kind", "remedy"]
    return _table(head + [f"torch, {mode}" for mode in torch], rows)


def _three(verdicts: Iterable[StockVerdict], explained: object = None) -> str:
    some = list(verdicts)
    errors, timeouts = (sum(v.report.how == how for v in some) for how in ("error", "timeout"))
    if explained is None:
        explained = sum(v.explained for v in some)
    return f"{errors} / {timeouts} / {explained}"


def _example(verdict: Verdict, torch: dict[str, list[StockVerdict]]) -> str:
    case = verdict.case
    before, _, body = case.text.partition("get_world_size()\n")
    title = (
        f"{EXAMPLES[case.name]} (`{case.name}.py`, starting at line {before.count(chr(10)) + 2}):"
    )
    code = dedent(body).strip().replace("  " + MARK, "")
    rows = [
        [f"torch, {mode}", _report_cell(v.report)]
        for mode, stock in torch.items()
        for v in stock
        if v.case.name == case.name
    ]
    rows.append(["distkit", _quote(verdict.shown)])
    table = _table(["", "report"], rows, numbers=False)
    return f"{title}\n\n```python\n{code}\n```\n\n{table}\n"


def _report_cell(report: StockReport) -> str:
    return _quote(report.text) if report.text else f"nothing: {_ENDS[report.how]}"


_ENDS = {"silent": "the program ends normally", "hang": "the program hangs"}


def _quote(text: str, limit: int = 500) -> str:
    line = " ".join(text.split()).replace("|", "\\|")
    return f"`` {line if len(line) <= limit else line[:limit] + '…'} ``"


def _failures(verdicts: Iterable[Verdict]) -> str:
    lines = [f"- `{v.case.name}`: {'; '.join(v.wrong)}" for v in verdicts if v.wrong]
    return "\n".join(lines) or "None."
