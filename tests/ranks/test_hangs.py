"""The catalogue of hanging programs on real ranks: each is released, and its cause is named."""

from __future__ import annotations

import inspect
import time
from pathlib import Path

import pytest

import distkit as dk
from distkit.cluster import Run
from distkit.diagnosis.findings import Finding, Kind
from distkit.hangs import ALL, Case

#: From the call to the error, fork and DDP's imports included [s]; alone it takes a tenth.
SOON = 20


def said(findings: list[Finding]) -> list[tuple[Kind, tuple[int, ...]]]:
    return [(f.kind, f.culprits) for f in findings]


def mistakes(run: Run) -> list[Finding]:
    """What was found, but for the remark that somebody is slow, which depends on the machine."""
    return [f for f in run.findings if f.kind is not Kind.STRAGGLER]


def outcome(case: Case) -> tuple[Run, Exception | None]:
    try:
        return dk.run_ranks(case.program, case.ranks), None
    except dk.errors.RunError as error:
        assert isinstance(error.run, Run)
        return error.run, error


def cases(how: str) -> pytest.MarkDecorator:
    names = [name for name, case in ALL.items() if case.how == how and name != "straggler"]
    return pytest.mark.parametrize("name", names)


@cases("hangs")
def test_a_hang_is_released_and_explained(name: str) -> None:
    case, start = ALL[name], time.monotonic()
    run, error = outcome(case)
    assert time.monotonic() - start < SOON
    assert isinstance(error, dk.errors.DeadlockError)
    assert said(mistakes(run)) == said(error.findings) == [(case.kind, case.culprits)]
    (finding,) = error.findings
    assert finding.hang and finding.waiting
    assert str(error) == f"{finding.message} {finding.remedy}\n{name} was stopped on all ranks."
    assert {line.rpartition(":")[0] for line in finding.lines.values()} == {"distkit/hangs.py"}
    assert all(line in finding.message for line in finding.lines.values())
    ends = {end.how for end in run.trace.info.ends.values()}
    assert "released" in ends and ends <= {"released", "returned"}


@cases("fails")
def test_a_failure_tells_its_cause(name: str) -> None:
    case = ALL[name]
    run, error = outcome(case)
    assert isinstance(error, dk.errors.RankError)
    assert isinstance(error, dk.errors.RankDied) == (name != "raised")
    assert error.rank == 1
    assert said(mistakes(run)) == [(case.kind, case.culprits)]
    if case.kind is Kind.WRONG_TENSOR:
        assert mistakes(run)[0].message in str(error)


@cases("finishes")
@pytest.mark.filterwarnings("ignore::UserWarning:torch")
def test_a_mistake_that_hangs_nobody_is_warned_of(name: str) -> None:
    case = ALL[name]
    with pytest.warns(dk.errors.CommunicationWarning) as caught:
        run = dk.run_ranks(case.program, case.ranks)
    (finding,) = mistakes(run)
    assert said([finding]) == [(case.kind, case.culprits)]
    assert not finding.hang
    assert [str(w.message) for w in caught] == [str(finding)]
    assert Path(caught[0].filename).name == "test_hangs.py", "it is at the reader's line"


def test_a_straggler_is_neither_a_hang_nor_a_mistake() -> None:
    run = dk.run_ranks(ALL["straggler"].program, 3)  # a warning would be an error here
    assert said(run.findings) == [(Kind.STRAGGLER, (2,))]
    assert not run.findings[0].hang


def test_the_catalogue_explains_itself() -> None:
    for name, case in ALL.items():
        assert name == case.program.__name__
        assert case.how in ("hangs", "fails", "finishes")
        assert case.title.endswith(".") and "\n" not in case.title
        assert case.source == inspect.getsource(case.program)
        assert set(case.culprits) <= set(range(case.ranks))
    shown = {case.kind for case in ALL.values()}
    # a signal stops a rank, a backend does not end what all have called: no mistake of a program
    others = {Kind.IN_BACKEND, Kind.STOPPED}
    others |= {Kind.BEHIND, Kind.NOT_JUDGED}  # of records that other programs made
    assert shown == set(Kind) - others, "every kind of finding has its example"


def test_a_saved_trace_tells_the_same(tmp_path: object) -> None:
    run, error = outcome(ALL["wrong_tag"])
    assert isinstance(error, dk.errors.DeadlockError)
    file = f"{tmp_path}/hang.gz"
    run.trace.save(file)
    assert dk.Trace.load(file).diagnose() == error.findings
