"""The error of a run: the user's line, the end of a process, the remedy."""

from __future__ import annotations

import linecache
import re
import signal

import pytest
import traces

import distkit as dk
from distkit.cluster import notebook
from distkit.cluster.runs import report
from distkit.cluster.runs.outcome import Outcome, describe, exit_cause, rank_ends
from distkit.kvstore.protocol.options import StoreOptions
from distkit.trace.trace import Trace

WORKERS = {str(r): {"name": f"worker {r}"} for r in range(2)}


def died(how: str) -> Outcome:
    return Outcome(1, died=how)


def error_of(outcome: Outcome) -> dk.errors.RankError:
    """Return the error of a run in which one rank had this outcome."""
    info = traces.info(world_size=2, ranks=WORKERS, ends=rank_ends([outcome]))
    error = report.run_error("train", [outcome], Trace([], info))
    assert isinstance(error, dk.errors.RankError)
    return error


def test_warning_in_a_notebook_is_wrapped_between_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notebook, "in_notebook", lambda: True)
    with pytest.warns(dk.errors.CommunicationWarning) as caught:
        notebook.warn([", ".join(["all_reduce() of float32[1]"] * 9)])
    rest = str(caught[0].message).split("\n")[1:]
    assert rest and all(len(s) <= 100 and s.startswith(("all", "of", "float")) for s in rest)


# -- the user's line ------------------------------------------------------------------


def raised() -> Exception:
    """Return an error raised in generated code, which has no file: a dataclass's ``__init__``."""
    with pytest.raises(dk.errors.KVStoreError, match="replce") as error:
        StoreOptions("dist_sync", 100, on_crash="replce")
    assert [f.path for f in error.traceback if "<string>" in str(f.path)]
    return error.value


def test_headline_joins_exception_and_line() -> None:
    try:
        raise ValueError("there are ranks 0 to 1.")
    except ValueError as error:
        raised = error_of(Outcome(0, error=describe(error, released=False)))
    headline = str(raised).partition("\n")[0]
    assert headline.startswith(
        f"rank 0 raised ValueError: there are ranks 0 to 1 at {raised.line}. "
    )


def test_error_in_generated_code_names_the_users_line() -> None:
    error = error_of(Outcome(0, error=describe(raised(), released=False)))
    file, _, number = error.line.rpartition(":")
    assert file.endswith("test_report.py")
    assert 'on_crash="replce"' in linecache.getline(__file__, int(number))
    assert "<string>" not in str(error)


def test_notebook_shows_the_users_line() -> None:
    where, _ = raised()._render_traceback_()  # type: ignore[attr-defined]
    assert re.match(r'----> \d+ StoreOptions\("dist_sync", 100, on_crash="replce"\)', where)


def test_notebook_wraps_long_messages_at_spaces() -> None:
    text = " ".join(["eleven-char"] * 30)
    (shown,) = dk.errors.DistkitError(f"{text}\n    code = {'x' * 200}")._render_traceback_()
    *message, code = shown.splitlines()
    assert " ".join(message).partition("\x1b[0m: ")[2] == text
    assert all(len(line) <= 100 + len("\x1b[31m\x1b[0m") for line in message)
    assert code == f"    code = {'x' * 200}"


# -- ended processes --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        (exit_cause(-signal.SIGKILL), "If memory ran out"),
        (exit_cause(-signal.SIGKILL), "the call or the command that sent the signal"),
        ("signal SIGSEGV", "crashed in native code"),
        ("exit status 3", "a call to os._exit"),
    ],
)
def test_exit_status_suggests_a_remedy(how: str, expected: str) -> None:
    message = str(error_of(died(how)))
    assert f"rank 1 exited ({how})" in message and expected in message
    assert ("memory ran out" in message) == (how == "signal SIGKILL")


def test_last_output_of_gloo_explains_the_death() -> None:
    log = "what(): [enforce fail at pair.cc:456] op.preamble.length <= op.nbytes. 12 vs 8. Received"
    message = str(error_of(died(exit_cause(-signal.SIGABRT, log=log))))
    assert "signal SIGABRT: gloo received 12 bytes where 8 were expected" in message
    assert "compare the shapes, dtypes and splits" in message and "os._exit" not in message
