"""The catalog of faulty programs: hangs are released, and the cause of each is named."""

from __future__ import annotations

import inspect
import re
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import distkit as dk
from distkit.cluster import Run
from distkit.diagnosis.rules import RULES, Finding
from distkit.events import State
from distkit_examples.hangs import ALL, Case

#: Time limit from the call to the error, with forks [s]; ten times the usual time.
LIMIT = 20


@pytest.fixture(scope="module", autouse=True)
def fork_server() -> None:
    """Start the fork server, whose import of torch would delay the report of the first hang."""
    dk.run_ranks(int, 1)


def kinds_and_culprits(findings: list[Finding]) -> list[tuple[str, tuple[int, ...]]]:
    return [(f.kind, f.culprits) for f in findings]


def mistakes(run: Run) -> list[Finding]:
    """Return the findings, except those about stragglers, which depend on the machine."""
    return [f for f in run.findings if f.kind != "straggler"]


def outcome(case: Case) -> tuple[Run, Exception | None]:
    try:
        return case.run(), None
    except dk.errors.RunError as error:
        assert isinstance(error.run, Run)
        return error.run, error


def cases(how: str) -> pytest.MarkDecorator:
    names = [
        name
        for name, case in ALL.items()
        if case.outcome == how and name != "straggler" and not case.servers
    ]
    return pytest.mark.parametrize("name", names)


@cases("hangs")
def test_hang_is_released_and_explained(name: str) -> None:
    case, start = ALL[name], time.monotonic()
    run, error = outcome(case)
    assert time.monotonic() - start < LIMIT
    assert isinstance(error, dk.errors.DeadlockError)
    assert (
        kinds_and_culprits(mistakes(run))
        == kinds_and_culprits(error.findings)
        == [(case.kind, case.culprits)]
    )
    (finding,) = error.findings
    assert finding.hang and finding.waiting
    assert str(finding).endswith(f" [{finding.code}]") and RULES[finding.code].name == case.kind
    assert str(error) == f"{finding}\n{name} was stopped on all ranks."
    assert {line.rpartition(":")[0] for line in finding.lines.values()} == {
        "companions/distkit_examples/hangs.py"
    }
    assert all(line in finding.message for line in finding.lines.values())
    ends = {end.how for end in run.trace.info.ends.values()}
    assert "released" in ends and ends <= {"released", "returned"}


def test_calls_that_fail_because_of_the_release_remain_open() -> None:
    def ring() -> None:
        n = dist.get_world_size()
        dist.recv(torch.zeros(1), src=(dist.get_rank() + 1) % n)

    with pytest.raises(dk.errors.DeadlockError) as caught:
        dk.run_ranks(ring, 16)
    assert isinstance(caught.value.run, Run)
    assert State.FAILED not in {event.state for event in caught.value.run.trace}


@cases("fails")
def test_failure_names_its_cause(name: str) -> None:
    case = ALL[name]
    run, error = outcome(case)
    assert isinstance(error, dk.errors.RankError)
    assert isinstance(error, dk.errors.RankDied) == (name != "raised")
    assert error.rank == 1
    assert kinds_and_culprits(mistakes(run)) == [(case.kind, case.culprits)]
    if case.kind == "wrong_tensor":
        assert mistakes(run)[0].message in str(error)


@cases("finishes")
@pytest.mark.filterwarnings("ignore::UserWarning:torch")
def test_mistake_without_a_hang_is_a_warning(name: str) -> None:
    case = ALL[name]
    with pytest.warns(dk.errors.CommunicationWarning) as caught:
        run = dk.run_ranks(case.program, case.ranks)
    (finding,) = mistakes(run)
    assert kinds_and_culprits([finding]) == [(case.kind, case.culprits)]
    assert not finding.hang
    assert [str(w.message) for w in caught] == [str(finding)]
    assert Path(caught[0].filename).name == "test_hangs.py", "it points to the user's line"


@pytest.mark.parametrize("name", [name for name, case in ALL.items() if case.servers])
def test_parameter_server_hang_is_explained(name: str) -> None:
    case = ALL[name]
    _, error = outcome(case)
    assert isinstance(error, dk.errors.DeadlockError)
    assert kinds_and_culprits(error.findings) == [(case.kind, case.culprits)]


def test_straggler_is_neither_a_hang_nor_a_mistake() -> None:
    run = dk.run_ranks(ALL["straggler"].program, 3)  # a warning would be an error here
    assert kinds_and_culprits(run.findings) == [("straggler", (2,))]
    assert not run.findings[0].hang


def test_catalog_is_complete() -> None:
    for name, case in ALL.items():
        assert name == case.program.__name__
        assert case.outcome in ("hangs", "fails", "finishes")
        assert re.fullmatch(r"[^\n]+\.", case.program.__doc__ or "")
        assert case.source == inspect.getsource(case.program)
        assert set(case.culprits) <= set(range(case.ranks))
    kinds = {case.kind for case in ALL.values()}
    # a stalled backend is not a mistake of a program; an incomplete recording has no program; the
    # order of messages from any source is random
    others = {"in_backend", "incomplete_recording", "message_race"}
    assert kinds == {rule.name for rule in RULES.values()} - others, (
        "every kind of finding has an example"
    )
