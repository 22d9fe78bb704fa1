"""``distkit replay`` opens a saved trace without torch or Jupyter."""

import gzip
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import traces
from traces import ring

from distkit.cli import main
from distkit.events import Event, Op, State
from distkit.trace.trace import Trace

#: Runs the command line without torch, Jupyter or the plotting packages.
WITHOUT_TORCH = """if True:
    import sys

    class Missing:
        def find_spec(self, name, *_):
            if name.partition(".")[0] in {"torch", "ipyparallel", "anywidget", "ipywidgets",
                                          "IPython", "traitlets", "zmq", "matplotlib", "pandas"}:
                raise ModuleNotFoundError(f"{name} is not installed")

    sys.meta_path.insert(0, Missing())
    from distkit.cli import main
    sys.exit(main(sys.argv[1:]))
"""


def run_without_torch(*argv: str | Path, **environ: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-Werror", "-c", WITHOUT_TORCH, *map(str, argv)]
    env = {"PATH": "/usr/bin:/bin", "COLUMNS": "200", **environ}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)


def test_trace_opens_in_the_browser_without_torch(tmp_path: Path) -> None:
    opened = tmp_path / "opened"
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\nprintf %s "$1" > {opened}\n')
    browser.chmod(0o755)
    file = ring().save(tmp_path / "ring.gz")
    ran = run_without_torch("replay", file, BROWSER=str(browser), TMPDIR=str(tmp_path))
    assert ran.returncode == 0, ran.stderr
    summary, address = ran.stdout.splitlines()
    assert summary == "ring all-reduce: 4 ranks, 0.00 s: 24 messages, 0 collectives."
    assert address == f"Replay: {opened.read_text()}"
    page = Path(opened.read_text().removeprefix("file://"))
    assert page.name == "ring.html" and page.is_relative_to(tmp_path)
    assert "stage0" in page.read_text(encoding="utf-8")


def test_replay_explains_a_hang(tmp_path: Path) -> None:
    fields = dict(nbytes=8, shape=(2,), dtype="float32", where="swap.py:4")
    trace = Trace(
        [
            Event(r, 0, Op.RECV, state, 0.1 * i, peer=1 - r, **fields)
            for r in range(2)
            for i, state in enumerate((State.STARTED, State.BLOCKED))
        ],
        traces.info(world_size=2),
    )
    file, page = trace.save(tmp_path / "hang.gz"), tmp_path / "out.html"
    ran = run_without_torch("replay", file, "--html", page, "--no-browser")
    assert ran.returncode == 0, ran.stderr
    assert "\n  - rank 0 waits in recv(src=1" in ran.stdout
    assert "\n    Let one of them send first. [DK101]\n" in ran.stdout
    assert f"Replay: {page.as_uri()}" in ran.stdout and page.stat().st_size > 1000


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda f: None, "run.trace: No such file or directory"),
        (lambda f: f.mkdir(), "the folder is empty"),
        (lambda f: f.write_text("hello"), "damaged, or not a trace"),
        (lambda f: f.write_bytes(ring().save(f).read_bytes()[:-40]), "is truncated or corrupt"),
        (
            lambda f: f.write_bytes(gzip.compress(b'{"format": "distkit-trace", "version": 99}')),
            "the trace is in format version 99, but this version of distkit reads version 4. "
            "Update distkit: ",
        ),
        (
            lambda f: f.write_text('{"traceEvents": 7}'),
            "Expected `array`, got `int` - at `$.traceEvents`",
        ),
        (lambda f: f.write_bytes(pickle.dumps(Path(f))), "which is not a plain value"),
    ],
)
def test_unreadable_file_prints_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], make: Callable[[Path], object], message: str
) -> None:
    file = tmp_path / "run.trace"
    make(file)
    assert main(["replay", str(file), "--no-browser"]) == 1
    output = capsys.readouterr()
    assert output.err.startswith(f"distkit: {file}") and message in output.err
    assert output.out == "" and "Traceback" not in output.err
