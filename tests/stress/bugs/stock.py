"""The reports of plain torch about the programs, and their evaluation."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any
from zlib import crc32

from tests.stress.bugs.suite import Case

HERE = Path(__file__).parent

#: The reports of the last ``python -m tests.stress.bugs --stock``: torch's version, then a line for
#: each program and mode.
SAVED = HERE / "stock.jsonl"

#: The modes of torch, with the environment variables of the ranks.
MODES = {
    "plain": {"TORCH_DISTRIBUTED_DEBUG": "OFF"},
    "DETAIL": {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"},
    "monitored_barrier": {"TORCH_DISTRIBUTED_DEBUG": "OFF"},
}

#: torch's timeout [s].
TIMEOUT = 20.0

#: The number of programs that run concurrently; they mostly wait.
AT_ONCE = 6

# An operation ran out of time.
_TIMED_OUT = re.compile(r"timed out|timeout", re.IGNORECASE)

# The peer of a connection has exited or given up.
_LOST = re.compile(r"closed by peer|reset by peer|pair closure", re.IGNORECASE)

# The text names the other rank, or two different values.
_NAMES = re.compile(
    r"rank \d+ is running|ranks? \d+(, \d+)* failed to pass|from rank \d+|\d+ vs\.? \d+",
    re.IGNORECASE,
)

# Positions in torch's source, and tensor options; neither explains anything.
_PLACE = re.compile(r"\[(enforce fail at )?\S*/([\w.]+:\d+)\]")
_OPTIONS = re.compile(r"TensorOptions\([^()]*(\([^()]*\)[^()]*)*\)")


@dataclass(frozen=True)
class StockReport:
    """torch's report about one program.

    Args:
        how: "error"; "timeout" if only a timeout was reported; "hang" if nothing was reported and
            a rank did not end; or "silent".
        text: the most informative of torch's errors; "" for none.
        lines: the program's lines in the tracebacks, as ``file:number``.
        barrier: whether a rank reached the ``monitored_barrier``.
        source: a checksum of the program.
    """

    how: str
    text: str
    lines: tuple[str, ...]
    barrier: bool
    source: int


@dataclass(frozen=True)
class StockVerdict:
    """The judgment of one of torch's reports.

    Args:
        case: the program.
        report: torch's report about it.
    """

    case: Case
    report: StockReport

    @property
    def reported(self) -> bool:
        """Whether more than a timeout was reported."""
        return self.report.how == "error"

    @property
    def right_line(self) -> bool:
        """Whether all marked lines are in the tracebacks."""
        return set(self.case.marked) <= set(self.report.lines)

    @property
    def explained(self) -> bool:
        """Whether the report explains the mistake."""
        return self.reported and explains(self.case, self.report.text)

    def counting_timeouts(self) -> StockVerdict:
        """Return the same verdict, with a timeout counted as a report."""
        how = "error" if self.report.how == "timeout" else self.report.how
        return replace(self, report=replace(self.report, how=how))


def explains(case: Case, text: str) -> bool:
    """Return whether a text names the other rank or two values, or matches the expected pattern."""
    text = _PLACE.sub("", text)
    if _NAMES.search(text):
        return True
    if not text or _TIMED_OUT.search(text) or _LOST.search(text):
        return False
    return re.search(case.says[0] if case.says else "", text, re.IGNORECASE) is not None


def read(case: Case, ends: Sequence[Mapping[str, Any]], timeout: float) -> StockReport:
    """Return torch's report, given how the ranks ended (``torch_ranks.End``)."""
    reports = sorted((seconds, _shorten(text)) for end in ends for seconds, text in end["errors"])
    crashes = [_crash(end) for end in ends if end["how"].startswith("signal")]
    if crashes or not all(_is_timeout(*report, timeout) for report in reports):
        how = "error"
    elif reports:
        how = "timeout"
    else:
        how = "hang" if any(end["how"] == "running" for end in ends) else "silent"
    texts = [*crashes, *(text for _, text in reports)]
    best = min(
        texts, key=lambda text: (not explains(case, text), bool(_LOST.search(text))), default=""
    )
    numbers = {
        int(number)
        for end in ends
        for number in re.findall(rf'/{case.name}\.py", line (\d+)', end["log"])
    }
    return StockReport(
        how,
        best,
        tuple(f"{case.name}.py:{number}" for number in sorted(numbers)),
        any(end["barrier"] for end in ends),
        crc32(case.text.encode()),
    )


def _shorten(text: str) -> str:
    return _OPTIONS.sub("TensorOptions(…)", _PLACE.sub(r"[\1…/\2]", text))


def _crash(end: Mapping[str, Any]) -> str:
    name = signal.Signals(int(end["how"].split()[1])).name
    what = re.search(r"what\(\):\s*(.+)", end["log"])
    return _shorten(f"{name}: {what[1]}" if what else name)


def _is_timeout(seconds: float, text: str, timeout: float) -> bool:
    consequence = seconds >= timeout and _LOST.search(text)
    return bool(_TIMED_OUT.search(text) or consequence) and not _NAMES.search(text)


def run(
    cases: Sequence[Case], mode: str, folder: Path, timeout: float = TIMEOUT
) -> dict[str, StockReport]:
    """Run programs on ranks of plain torch.

    Args:
        cases: the programs.
        mode: a key of ``MODES``.
        folder: an empty folder for the programs and their output.
        timeout: torch's timeout [s]; programs are killed after three times this time.
    """
    for case in cases:
        folder.joinpath(f"{case.name}.py").write_text(case.text, encoding="utf-8")
    job = {
        "programs": [(str(folder / f"{case.name}.py"), case.ranks) for case in cases],
        "timeout": timeout,
        "barrier": mode == "monitored_barrier",
        "at_once": AT_ONCE,
    }
    with subprocess.Popen(
        [sys.executable, str(HERE / "torch_ranks.py")],
        stdin=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **MODES[mode]},
        start_new_session=True,
    ) as parent:
        try:
            parent.communicate(json.dumps(job))
        except BaseException:  # including an interrupt: leave no rank running
            os.killpg(parent.pid, signal.SIGKILL)
            raise
    return {
        case.name: read(case, json.loads(folder.joinpath(f"{case.name}.json").read_text()), timeout)
        for case in cases
    }


@dataclass(frozen=True)
class Stock:
    """The reports of one version of torch.

    Args:
        torch: the version of torch.
        date: the date of the run.
        timeout: torch's timeout [s].
        reports: the reports, by mode and program.
    """

    torch: str
    date: str
    timeout: float
    reports: dict[str, dict[str, StockReport]]

    def verdicts(self, mode: str, cases: Iterable[Case]) -> list[StockVerdict]:
        """Judge the reports about these programs.

        Raises:
            LookupError: a program is new or has changed since the reports were saved.
        """
        verdicts = []
        for case in cases:
            report = self.reports[mode].get(case.name)
            if report is None or report.source != crc32(case.text.encode()):
                raise LookupError(
                    f"{SAVED.name} has no report about this version of {case.name}: "
                    "run python -m tests.stress.bugs --stock"
                )
            verdicts.append(StockVerdict(case, report))
        return verdicts

    def updated(self, newer: Stock) -> Stock:
        """Return these reports, updated with the reports in ``newer``.

        Raises:
            ValueError: the reports are from different versions of torch.
        """
        if newer.torch != self.torch:
            raise ValueError(
                f"{SAVED.name} is from torch {self.torch}, but this is torch {newer.torch}: "
                "run --stock for all programs"
            )
        reports = {mode: {**rows, **newer.reports[mode]} for mode, rows in self.reports.items()}
        return replace(newer, reports=reports)

    def save(self, file: Path = SAVED) -> None:
        """Save the reports for ``load``."""
        head = {"torch": self.torch, "date": self.date, "timeout": self.timeout}
        rows = [
            {"mode": mode, "name": name, **asdict(report)}
            for mode, by_name in self.reports.items()
            for name, report in by_name.items()
        ]
        lines = [json.dumps(row, ensure_ascii=False) for row in (head, *rows)]
        file.write_text("\n".join(lines) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, file: Path = SAVED) -> Stock:
        """Load the saved reports."""
        head, *rows = (json.loads(line) for line in file.read_text(encoding="utf-8").splitlines())
        reports: dict[str, dict[str, StockReport]] = {mode: {} for mode in MODES}
        for row in rows:
            mode, name = row.pop("mode"), row.pop("name")
            reports[mode][name] = StockReport(**{**row, "lines": tuple(row["lines"])})
        return cls(**head, reports=reports)


def run_all(cases: Sequence[Case], folder: Path) -> Stock:
    """Run the programs in all modes, which takes about ten minutes for the whole suite."""
    reports = {}
    for mode in MODES:
        subfolder = folder / mode
        subfolder.mkdir()
        reports[mode] = run(cases, mode, subfolder)
    return Stock(version("torch"), date.today().isoformat(), TIMEOUT, reports)
