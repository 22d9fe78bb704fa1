"""Incorrect and correct programs, and the verdicts on distkit's reports about them.

``cases.json`` contains small programs for gloo on the CPU, which cover the error classes of the MPI
Bugs Initiative. ``threads.json`` and ``themes.json`` contain bugs from public issue threads; themes
also name the culprit ranks. An explanation must name the lines that end in ``# <-``. Scores are
computed like the Initiative's (Laurent, Saillard and Quinson, Correctness 2021).
"""

from __future__ import annotations

import json
import re
import time
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import distkit as dk
from distkit.events import State
from distkit_examples import hangs

HERE = Path(__file__).parent

#: Marks a line that the explanation must name.
MARK = "# <-"

#: The classes of wrong programs; classes of correct ones begin with "ok/".
TITLES = {
    "call/coll": "Collectives in different orders, or missing on a rank",
    "call/condition": "Collectives under a condition that depends on the rank",
    "call/p2p": "send without recv, recv without send",
    "call/mixed": "send, recv and collectives in different orders",
    "param/root": "Different roots",
    "param/op": "Different reductions",
    "param/dtype": "Different dtypes",
    "param/size": "Different sizes",
    "param/tag": "Different tags",
    "param/comm": "Different groups",
    "argument": "Invalid arguments",
    "request/wait": "Missing wait()",
    "local": "Buffers used before wait()",
    "race": "Message races",
    "buffering": "Sends that rely on buffering",
    "group": "Process groups: leaked, destroyed, called by some members only",
    "training": "Training loops: gradients, data loaders, early exits",
    "store": "Key-value stores",
    "thread": "Bugs from public threads",
}

#: Timeout of a run, after which it counts as not explained [s].
LIMIT = 60.0

_IMPORTS = """\
import os, signal, sys, threading, time
import torch
import torch.distributed as dist
"""

_PROGRAM = """
def program():
    me, n = dist.get_rank(), dist.get_world_size()
{body}
"""

_THREAD = """
def rank():
    return dist.get_rank()

def thread(*args, **kwargs):
    return lambda fn: fn

{source}
program = {name}
"""

_THEME = """\
from __future__ import annotations

import sys
from torch.nn.parallel import DistributedDataParallel

"""
_SHARED = """
def rank():
    return dist.get_rank()

def ones(*shape, dtype=torch.float32):
    return torch.ones(*shape, dtype=dtype)

def rows(x, n=3):
    return [torch.zeros_like(x) for _ in range(n)]

def ddp(module=None):
    return DistributedDataParallel(
        module or torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
    )

class Experts(torch.nn.Module):
    def __init__(self, experts=2):
        super().__init__()
        self.shared = torch.nn.Linear(4, 4)
        self.experts = torch.nn.ModuleList(torch.nn.Linear(4, 2) for _ in range(experts))

    def forward(self, x, *chosen):
        h = self.shared(x)
        return torch.stack([self.experts[i](h) for i in chosen]).sum(0)

{source}
program = {name}
"""


@dataclass(frozen=True)
class Case:
    """A program, and the requirements on its explanation.

    Args:
        name: its unique name.
        cls: its class: a key of ``TITLES``, "ok/…" or "theme/…".
        ok: whether the program is correct; then nothing may be reported.
        ranks: the number of ranks.
        kinds: the acceptable kinds of finding; empty for any.
        says: regular expressions that the report must match, ignoring case.
        text: the source of the module that defines ``program``.
        url: the issue thread.
        culprits: the culprit ranks; empty for any.
    """

    name: str
    cls: str
    ok: bool
    ranks: int
    kinds: tuple[str, ...]
    says: tuple[str, ...]
    text: str
    url: str = ""
    culprits: tuple[int, ...] = ()

    @cached_property
    def marked(self) -> tuple[str, ...]:
        """The marked lines, as ``file:number``."""
        rows = enumerate(self.text.splitlines(), 1)
        return tuple(f"{self.name}.py:{number}" for number, row in rows if row.endswith(MARK))

    def module(self, folder: Path) -> ModuleType:
        """Write the program's module into a folder, and import it."""
        file = folder / f"{self.name}.py"
        file.write_text(self.text, encoding="utf-8")
        spec = spec_from_file_location(self.name, file)
        assert spec is not None and spec.loader is not None
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        return module


def cases() -> list[Case]:
    """Return the programs of ``cases.json``."""
    found = []
    for row in _rows("cases.json"):
        body = "\n".join("    " + line if line else "" for line in row.pop("body").splitlines())
        text = _IMPORTS + _PROGRAM.format(body=body)
        lists = {key: tuple(row.pop(key)) for key in ("kinds", "says")}
        found.append(Case(**row, **lists, text=text))
    return found


def threads() -> list[Case]:
    """Return the programs of ``threads.json``."""
    return [
        Case(
            row["name"],
            "thread",
            row["ok"],
            row["ranks"],
            (),
            () if row["ok"] else (row["cause"], row["remedy"]),
            _IMPORTS + _THREAD.format(source=row["source"], name=row["name"]),
            row["url"],
        )
        for row in _rows("threads.json")
    ]


def themes() -> list[Case]:
    """Return the programs of ``themes.json``, and those of ``distkit_examples.hangs``."""
    found = []
    for row in _rows("themes.json"):
        source, lists = (
            row.pop("source"),
            {k: tuple(row.pop(k)) for k in ("kinds", "culprits", "says")},
        )
        text = _THEME + _IMPORTS + _SHARED.format(source=source, name=row["name"])
        found.append(Case(**row, **lists, text=text))
    return found + [
        Case(
            name,
            "theme/hangs",
            False,
            case.ranks,
            (case.kind,),
            (),
            f"from distkit_examples.hangs import {name} as program\n",
            culprits=case.culprits,
        )
        for name, case in hangs.ALL.items()
        if case.kind != "straggler" and not case.servers
    ]


def _rows(name: str) -> list[dict[str, Any]]:
    return list(json.loads((HERE / name).read_text(encoding="utf-8")))


@dataclass(frozen=True)
class Verdict:
    """distkit's report about a program, compared with the expected one.

    Args:
        case: the program.
        kind: the kind of the first finding; "" for none.
        count: the number of findings.
        shown: the report: the text of the error and the warnings.
        seconds: the time from the last rank's wait to the end of the run, or the time to check a
            run that ended normally [s].
        culprits: the culprit ranks of the first finding.
    """

    case: Case
    kind: str
    count: int
    shown: str
    seconds: float
    culprits: tuple[int, ...] = ()

    @property
    def reported(self) -> bool:
        """Whether anything was reported."""
        return bool(self.shown)

    @property
    def right_kind(self) -> bool:
        """Whether the kind is acceptable."""
        return not self.case.kinds or self.kind in self.case.kinds

    @property
    def right_line(self) -> bool:
        """Whether all marked lines are named."""
        return all(line in self.shown for line in self.case.marked)

    @property
    def right_remedy(self) -> bool:
        """Whether the report matches all expected patterns."""
        return all(re.search(pattern, self.shown, re.IGNORECASE) for pattern in self.case.says)

    @property
    def wrong(self) -> list[str]:
        """The errors in the explanation."""
        if self.case.ok:
            return ["a false alarm"] if self.reported else []
        if not self.reported:
            return ["nothing reported"]
        found = [] if self.right_kind else [f"kind {self.kind or 'none'}"]
        if self.case.culprits not in ((), self.culprits):
            found.append(f"culprits {self.culprits}, not {self.case.culprits}")
        found += [f"{line} not named" for line in self.case.marked if line not in self.shown]
        found += [
            f"no match for {pattern!r}"
            for pattern in self.case.says
            if not re.search(pattern, self.shown, re.IGNORECASE)
        ]
        return found + ([f"{self.count} findings"] if self.count > 1 else [])


def judge(case: Case, folder: Path) -> Verdict:
    """Run a program on new ranks, and judge the report."""
    program = case.module(folder).program
    message = ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            run = dk.run_ranks(program, case.ranks, timeout=LIMIT)
        except (dk.errors.RunError, dk.errors.RunStopped) as error:
            run, message = error.run, str(error)
    end = time.monotonic()
    waits = [e.time for e in run.trace if e.state is State.BLOCKED]
    if message and waits:
        seconds = end - max(waits)
    else:
        seconds = end - run.trace.info.until
    shown = "\n".join([message, *(str(w.message) for w in caught)]).strip()
    findings = run.findings
    kind, culprits = (findings[0].kind, findings[0].culprits) if findings else ("", ())
    return Verdict(case, kind, len(findings), shown, seconds, culprits)


class Judged(Protocol):
    """A program, and whether anything was reported."""

    @property
    def case(self) -> Case: ...

    @property
    def reported(self) -> bool: ...


@dataclass(frozen=True)
class Score:
    """The numbers of true and false positives and negatives, as the Initiative defines them.

    >>> score = Score(9, 1, 9, 1)
    >>> score.recall, score.specificity, score.f1
    (0.9, 0.9, 0.9)
    """

    true_positives: int
    false_positives: int
    true_negatives: int
    false_negatives: int

    @classmethod
    def of(cls, verdicts: Iterable[Judged]) -> Score:
        """Count the reports on wrong and on correct programs."""
        pairs = [(v.case.ok, v.reported) for v in verdicts]
        return cls(
            pairs.count((False, True)),
            pairs.count((True, True)),
            pairs.count((True, False)),
            pairs.count((False, False)),
        )

    @property
    def recall(self) -> float:
        """The fraction of incorrect programs that are reported."""
        return _share(self.true_positives, self.false_negatives)

    @property
    def specificity(self) -> float:
        """The fraction of correct programs without a report."""
        return _share(self.true_negatives, self.false_positives)

    @property
    def precision(self) -> float:
        """The fraction of reports that concern incorrect programs."""
        return _share(self.true_positives, self.false_positives)

    @property
    def f1(self) -> float:
        """The harmonic mean of recall and precision."""
        total = self.recall + self.precision
        return 2 * self.recall * self.precision / total if total else 0.0


def _share(part: int, rest: int) -> float:
    return part / (part + rest) if part + rest else 1.0


def right(verdicts: Sequence[Verdict]) -> dict[str, int]:
    """Count the correct parts of the explanations of reported wrong programs."""
    found = [v for v in verdicts if v.reported and not v.case.ok]
    return {
        "reported": len(found),
        "line": sum(v.right_line for v in found),
        "kind": sum(v.right_kind for v in found),
        "remedy": sum(v.right_remedy for v in found),
        "one finding": sum(v.count <= 1 for v in found),
    }
