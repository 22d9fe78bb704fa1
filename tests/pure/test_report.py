"""How a run's error is told: which line is the user's, how a process ended, what to do."""

from __future__ import annotations

import linecache
import re
import signal
from typing import Any

import pytest
import traces

import distkit as dk
from distkit.cluster.runs import report
from distkit.cluster.runs.outcome import Failure, Outcome, describe
from distkit.kvstore.protocol.options import StoreOptions
from distkit.recording import trouble
from distkit.trace.calls import SILENT, silence
from distkit.trace.info import Replacement
from distkit.trace.trace import Trace

WORKERS = {str(r): {"name": f"worker {r}"} for r in range(2)}


def died(how: str, rank: int = 1) -> Outcome:
    return Outcome(rank, died=how)


def told(outcome: Outcome, **facts: Any) -> dk.errors.RankError:
    """The error of a run in which one rank came to this end."""
    ends = report.ends([outcome])
    trace = Trace([], traces.info(world_size=2, ranks=WORKERS, ends=ends, **facts))
    error = report.verdict("train", [outcome], trace)
    assert isinstance(error, dk.errors.RankError)
    return error


# -- the user's line ------------------------------------------------------------------


def raised() -> Exception:
    """An error from the ``__init__`` that ``@dataclass`` has written, which is in no file."""
    with pytest.raises(dk.errors.KVStoreError, match="replce") as error:
        StoreOptions("dist_sync", 100, on_crash="replce")
    assert [f.path for f in error.traceback if "<string>" in str(f.path)]
    return error.value


def test_no_full_stop_stands_between_an_exception_and_its_line() -> None:
    try:
        raise ValueError("there are ranks 0 to 1.")
    except ValueError as error:
        said = told(Outcome(0, error=describe(error, released=False)))
    headline = str(said).partition("\n")[0]
    assert headline.startswith(f"rank 0 raised ValueError: there are ranks 0 to 1 at {said.line}. ")


def test_code_that_nobody_can_read_is_not_to_blame() -> None:
    error = told(Outcome(0, error=describe(raised(), released=False)))
    file, _, number = error.line.rpartition(":")
    assert file.endswith("test_report.py")
    assert 'on_crash="replce"' in linecache.getline(__file__, int(number))
    assert "<string>" not in str(error)


def test_a_notebook_shows_the_readers_line() -> None:
    where, _ = raised()._render_traceback_()  # type: ignore[attr-defined]
    assert re.match(r'----> \d+ StoreOptions\("dist_sync", 100, on_crash="replce"\)', where)


def test_a_notebook_breaks_long_messages_at_spaces() -> None:
    said = " ".join(["eleven-char"] * 30)
    (shown,) = dk.errors.DistkitError(f"{said}\n    code = {'x' * 200}")._render_traceback_()
    *message, code = shown.splitlines()
    assert " ".join(message).partition("\x1b[0m: ")[2] == said
    assert all(len(line) <= 100 + len("\x1b[31m\x1b[0m") for line in message)
    assert code == f"    code = {'x' * 200}"


def test_a_program_without_a_file_has_lines_all_the_same() -> None:
    """As with ``python -c``."""
    frames = [("<string>", 3, "<module>", None), ("<string>", 2, "train", None)]
    assert told(Outcome(0, error=Failure("E", frames=frames))).line == "<string>:2"


# -- processes that are gone ------------------------------------------------------------


def test_one_that_hung_is_told_from_one_that_crashed() -> None:
    hung = report.cause(-signal.SIGKILL, silent_for=2.5)
    assert hung == f"it {silence(2.5)}"
    said = str(told(died(hung)))
    assert "rank 1 hung (it missed heartbeats for 2.5 s" in said
    assert "SIGSTOP" in said and "heartbeat_timeout" in said
    assert "memory ran out" not in said

    said = str(told(died(report.cause(-signal.SIGKILL))))
    assert "rank 1 ended (signal SIGKILL)" in said
    assert "memory ran out" in said and SILENT not in said


@pytest.mark.parametrize(
    ("how", "says"),
    [("signal SIGSEGV", "crashed in native code"), ("exit status 3", "a call of os._exit")],
)
def test_how_a_process_ended_says_where_to_look(how: str, says: str) -> None:
    said = str(told(died(how)))
    assert says in said and "memory ran out" not in said


def test_the_last_words_of_gloo_are_evidence() -> None:
    log = "what(): [enforce fail at pair.cc:456] op.preamble.length <= op.nbytes. 12 vs 8. Received"
    said = str(told(died(report.cause(-signal.SIGABRT, log=log))))
    assert "signal SIGABRT: gloo received 12 bytes where 8 were expected" in said
    assert "compare the shapes, dtypes and splits" in said and "os._exit" not in said


def test_one_that_crashed_while_it_was_to_be_ended_has_crashed() -> None:
    assert report.cause(-signal.SIGSEGV, silent_for=2.5) == "signal SIGSEGV"


@pytest.mark.parametrize(
    ("how", "says"),
    [
        (
            f"it {silence(1)}",
            "server 0 hung in the middle of train (it missed heartbeats for 1 s",
        ),
        ("signal SIGKILL", "server 0 ended in the middle of train (signal SIGKILL)"),
    ],
)
def test_the_remedy_of_a_replaced_one_is_for_how_it_ended(how: str, says: str) -> None:
    (said,) = report.of_replacements("train", [Replacement(2, "server 0", how, 0.0)])
    assert said.startswith(says)
    assert ("heartbeat_timeout" in said) == (SILENT in how)


# -- ranks that were replaced -------------------------------------------------------------


def replaced(*hows: str, rank: int = 1) -> list[Replacement]:
    return [Replacement(rank, f"worker {rank}", how, 0.0) for how in hows]


@pytest.mark.parametrize(
    ("lives", "says"),
    [
        (
            replaced(*["exit status 3"] * 3),
            "replaced 3 times, which is the most, and ended each time (exit status 3).",
        ),
        (
            replaced("exit status 3", "signal SIGSEGV"),
            "replaced 2 times and ended each time (exit status 3; signal SIGSEGV).",
        ),
        (replaced("exit status 3"), "replaced once and ended each time (exit status 3)."),
    ],
)
def test_a_death_after_replacements_tells_of_them(lives, says: str) -> None:
    assert says in str(told(died("exit status 3"), replaced=lives))


def test_replacements_of_others_are_not_told() -> None:
    lives = replaced("signal SIGKILL", rank=0)
    assert "was replaced" not in str(told(died("exit status 3"), replaced=lives))


# -- trouble for those that have no rank ----------------------------------------------------


@pytest.mark.parametrize(
    "asked",
    [
        {"kill": {"server 0": 8}},
        {"kill": {"0": 8}},
        {"delay": {"worker 1": 0.1}},
        {"drop_rank": "server 0"},
        {"drop_rank": {1.5: 2}},
    ],
)
def test_a_name_is_no_rank(asked: dict[str, Any]) -> None:
    with pytest.raises(ValueError) as error, dk.trouble(**asked):
        pytest.fail("it was accepted")
    ((option, given),) = asked.items()
    named = next(iter(given)) if isinstance(given, dict) else given
    assert str(error.value).startswith(f"dk.trouble({option}=…) got {named!r}. Name a rank")
    assert "by its number" in str(error.value) and "cluster.status()" in str(error.value)


def test_a_number_of_a_server_is_no_rank() -> None:
    with dk.trouble(kill={2: 8}):
        made = trouble.current()
    assert made is not None
    made.check(3)
    with pytest.raises(ValueError, match=r"ranks are 0 to 1\. Servers and the"):
        made.check(2, servers=1)
    with pytest.raises(ValueError, match=r"ranks are 0 to 1\.$"):
        made.check(2)
