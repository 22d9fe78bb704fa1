"""The command line: arguments, errors, exit statuses, and benchmark figures."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import benchmarks
from benchmarks.figure import Figure, figure
from distkit import cli
from distkit.cluster.runs import run as local
from distkit.events import Event, Op, State
from distkit.trace.trace import Trace
from distkit_course.cli import JUPYTERLAB

TRACE = Trace(
    [
        Event(0, 0, Op.SEND, State.STARTED, 0.0, peer=1, nbytes=8),
        Event(1, 0, Op.RECV, State.COMPLETED, 0.5, peer=0, nbytes=8),
        *(Event(r, 1, Op.ALL_REDUCE, State.COMPLETED, 1.0, nbytes=8) for r in range(2)),
    ]
)


def usage_error(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """Return the error message for invalid arguments."""
    with pytest.raises(SystemExit) as exit:
        cli.main(argv)
    assert exit.value.code == 2
    return capsys.readouterr().err


# -- arguments -----------------------------------------------------------------


def test_help_imports_no_torch() -> None:
    code = "import sys; from distkit.cli import main\ntry: main(['--help'])\n"
    code += "finally: print('\\n', *sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    output, _, modules = ran.stdout.rpartition("\n ")
    commands = ("demo", "trace", "replay", "doctor", "lab", "bench")
    assert all(f"\n    {name} " in output for name in commands)
    assert not {"torch", "numpy", "rich", "ipyparallel", "psutil"} & set(modules.split())


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "required: COMMAND"),
        (["demo", "p3p"], "invalid choice: 'p3p'"),
        (
            ["demo", "--html", "nowhere/d.html"],
            "nowhere/d.html cannot be written: check that the folder exists and is writable",
        ),
        (["demo", "--html", "."], ". is a folder: pass the name of a file"),
        (["trace"], "missing script; usage: distkit trace -- train.py"),
        (["trace", "--", "missing.py"], "missing.py: script not found"),
        (["trace", "--ranks", "two", "--", "x.py"], "invalid int value: 'two'"),
        (["replay"], "arguments are required: FILE"),
        (
            ["replay", "t.gz", "--html", "nowhere/r.html"],
            "cannot be written: check that the folder exists and is writable",
        ),
        (["bench", "speed"], "unknown benchmark 'speed': choose start, "),
        (["bench", "course.nothing"], "unknown benchmark 'course.nothing': choose start, "),
    ],
)
def test_invalid_arguments_exit_with_usage(
    argv: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in usage_error(capsys, *argv)


# -- trace -----------------------------------------------------------------------


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty script in the current folder."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.py"
    path.touch()
    return path


@pytest.mark.parametrize(
    ("argv", "ranks", "passed"),
    [
        (["--", "train.py"], 4, []),
        (["--ranks", "2", "--", "train.py", "--lr", "1", "--", "x"], 2, ["--lr", "1", "--", "x"]),
        (["--ranks", "3", "train.py", "--ranks", "5"], 3, ["--ranks", "5"]),
    ],
)
def test_trace_runs_the_script_with_its_arguments(
    argv: list[str],
    ranks: int,
    passed: list[str],
    script: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    calls = []

    def run_ranks(*call: Any, seed: int | None) -> Any:
        calls.append((*call, seed))
        return SimpleNamespace(trace=TRACE)

    monkeypatch.setattr(local, "run_ranks", run_ranks)
    assert cli.main(["trace", "--html", "t.html", "--seed", "7", *argv]) == 0
    assert calls == [("train.py", ranks, *passed, 7)]
    output = capsys.readouterr().out.splitlines()
    assert output[0] == "2 ranks, 1.00 s: 1 message, 1 collective. Saved in trace.gz."
    assert output[1] == f"Replay: {(script.parent / 't.html').as_uri()}"
    assert len(Trace.load("trace.gz")) == len(TRACE)
    assert "<script" in Path("t.html").read_text()


# -- lab -------------------------------------------------------------------------


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands passed to os.execv, which does not run them."""
    commands: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda _, command: commands.append(command))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("JUPYTER_CONFIG_PATH", "theirs")
    return commands


@pytest.mark.parametrize("options", [["--no-browser", "--port", "9000"], ["--", "--no-browser"]])
def test_lab_opens_a_notebook(
    options: list[str], executed: list[list[str]], tmp_path: Path
) -> None:
    assert cli.main(["lab", str(tmp_path), *options]) == 0
    (command,) = executed
    assert command[:4] == [sys.executable, "-c", JUPYTERLAB, str(tmp_path)]
    added, existing = os.environ["JUPYTER_CONFIG_PATH"].split(os.pathsep)
    assert "announcements" in Path(added, "labconfig", "page_config.json").read_text()
    assert existing == "theirs"
    assert command[4:] == [option for option in options if option != "--"]


@pytest.fixture
def checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A checkout with two notebooks."""
    (tmp_path / "notebooks").mkdir()
    for name in ("00_welcome.ipynb", "01_messages.ipynb"):
        (tmp_path / "notebooks" / name).write_text("first")
    monkeypatch.setattr("distkit.cli.CHECKOUT", tmp_path)
    return tmp_path


def test_lab_keeps_changed_notebooks(executed: list[list[str]], checkout: Path) -> None:
    assert cli.main(["lab"]) == 0
    mine = checkout / "my-notebooks"
    (mine / "00_welcome.ipynb").unlink()
    (mine / "01_messages.ipynb").write_text("mine")
    assert cli.main(["lab"]) == 0
    assert [path.read_text() for path in sorted(mine.glob("*"))] == ["first", "mine"]


def test_lab_without_a_checkout_explains_where_to_get_notebooks(
    executed: list[list[str]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("distkit.cli.CHECKOUT", tmp_path)
    assert cli.main(["lab"]) == 1
    output = capsys.readouterr().err
    assert "get the `notebooks` folder from your instructor" in output
    assert output.endswith("distkit lab notebooks\n") and executed == []


@pytest.mark.parametrize(
    ("missing", "remedy"),
    [
        ("notebook", "no.ipynb: notebook or folder not found"),
        ("jupyterlab", "pip install jupyterlab"),
    ],
)
def test_lab_names_missing_packages(
    missing: str,
    remedy: str,
    executed: list[list[str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if missing == "jupyterlab":
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert cli.main(["lab", "no.ipynb"]) == 1
    assert remedy in capsys.readouterr().err
    assert executed == []


# -- bench -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("samples", "against", "limits", "verdict"),
    [
        ([1.0, 3.0, 2.0], [8.0], {"limit": 0.25, "target": 0.2}, "limit met"),
        ([1.0], [8.0], {"limit": 0.25, "target": 0.2}, "target met"),
        ([4.0], [8.0], {"limit": 0.25}, "not met"),
        ([4.0], [8.0], {"target": 0.4}, "not met"),
        ([4.0], [8.0], {"limit": 5, "absolute": True}, "limit met"),
        ([0.0], None, {"limit": 0, "absolute": True}, "limit met"),
        ([4.0], None, {"limit": 5}, "reference missing"),
        ([4.0], [8.0], {}, ""),
    ],
)
def test_figure_reports_the_strictest_limit_that_it_meets(
    samples: list[float], against: list[float] | None, limits: dict[str, Any], verdict: str
) -> None:
    assert figure("x", "s", samples, "other", against, **limits).verdict == verdict


@pytest.fixture
def requested(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of repetitions requested from a benchmark that measures nothing."""
    reps: list[int] = []
    found = [
        Figure(
            "a step", "ms", 1.234, 1.0, 2.0, 5, "the same without", 1.0, limit=1.05, target=1.02
        ),
        Figure("a call", "s", 0.5, reference="reference missing: pip install accelerate", limit=5),
    ]

    def module(name: str) -> Any:
        def measure(n: int, log: Callable[[str], None]) -> Any:
            log(f"{name} begins")
            reps.append(n)
            return found, {"n": n}

        return SimpleNamespace(measure=measure)

    monkeypatch.setattr(benchmarks, "import_module", module)
    return reps


def test_bench_prints_one_json_object(
    requested: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "tap", "--json", "--reps", "7"]) == 0
    output = capsys.readouterr()
    report = json.loads(output.out)
    assert {"cpus", "python", "torch", "load_before"} <= set(report["machine"])
    assert [f["verdict"] for f in report["figures"]] == ["not met", "reference missing"]
    assert report["figures"][0]["ratio"] == 1.234
    assert report["details"] == {"tap": {"n": 7}}
    assert output.err == "benchmarks.tap begins\n"
    assert requested == [7]
