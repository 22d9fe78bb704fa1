"""Sweeps without ranks: whether a function is the same, what a folder keeps, what a frame shows."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import distkit as dk
from distkit.errors import DistkitError
from distkit.events import Event, Op, State
from distkit.experiments.fingerprint import fingerprint
from distkit.experiments.folder import RUNS, Folder
from distkit.experiments.results import Record, SavedRun
from distkit.experiments.sweep import Sweep
from distkit.trace.trace import Trace

PROGRAM = """
FACTOR = 3
TABLE = {"b": [1, 2], "a": {"x", "y", "z"}}
class Model:
    def forward(self, x):
        return helper(x) * FACTOR
def helper(x):
    return [x for _ in range(2) if x in {"left", "right", "up"}]
def train(lr=0.1, *, steps=5):
    # a comment
    return Model().forward(lr) + [TABLE for _ in helper(lr)]
"""


def made(program: str) -> Any:
    space: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(program, "lesson.py", "exec"), space)
    return space["train"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("FACTOR = 3", "FACTOR = 4"),
        ("[1, 2]", "[1, 3]"),
        ("lr=0.1", "lr=0.2"),
        ("steps=5", "steps=6"),
        ("* FACTOR", "+ FACTOR"),
        ("range(2)", "range(3)"),
        ('"up"', '"down"'),
    ],
)
def test_a_change_of_what_a_function_does_is_noticed(old: str, new: str) -> None:
    assert fingerprint(made(PROGRAM)) != fingerprint(made(PROGRAM.replace(old, new)))


def test_comments_and_lines_are_no_change() -> None:
    other = PROGRAM.replace("# a comment", "# another\n\n")
    assert fingerprint(made(PROGRAM)) == fingerprint(made("\n\n" + other))


def test_data_of_numpy_and_torch_counts() -> None:
    import torch

    def over(x: Any) -> Callable[[], Any]:
        return lambda: x

    assert fingerprint(over(torch.ones(3))) == fingerprint(over(torch.ones(3)))
    assert fingerprint(over(torch.ones(3))) != fingerprint(over(torch.zeros(3)))
    assert fingerprint(over(torch.ones(3).numpy())) != fingerprint(over(torch.zeros(3).numpy()))


def test_a_function_that_refers_to_itself_has_one() -> None:
    def down(n: int) -> int:
        return n and down(n - 1)

    loop: list[Any] = []
    loop.append(loop)
    assert fingerprint(down) == fingerprint(down)
    assert fingerprint(lambda: loop) != fingerprint(down)


# -- the folder --------------------------------------------------------------------


def trace(rank: int = 0) -> Trace:
    return Trace([Event(rank, 0, Op.ALL_REDUCE, State.STARTED, 0.0)])


def record(value: float = 0.5, **given: Any) -> Record:
    return Record(given, SavedRun(trace()), {"seconds": 1.5, "messages": 3}, {"loss": value})


def train(batch: int = 8) -> None: ...


def other(batch: int = 8) -> None:
    print(batch)


def test_what_was_kept_is_found_again(tmp_path: Path) -> None:
    Folder(tmp_path / "new", train).add(record(ranks=2, batch=8))
    found = Folder(tmp_path / "new", train).find({"batch": 8, "ranks": 2})
    assert found is not None
    assert (found.values, found.measured) == ({"loss": 0.5}, {"seconds": 1.5, "messages": 3})
    assert found.run.trace.events == trace().events
    assert Folder(tmp_path / "new", train).find({"batch": 16, "ranks": 2}) is None
    assert Folder(tmp_path / "new", other).find({"batch": 8, "ranks": 2}) is None


def test_functions_are_recognized_as_values(tmp_path: Path) -> None:
    Folder(tmp_path, train).add(record(ranks=2, step=other))
    assert Folder(tmp_path, train).find({"ranks": 2, "step": other})
    assert Folder(tmp_path, train).find({"ranks": 2, "step": train}) is None
    with pytest.raises(TypeError, match="cannot recognize step=<object"):
        Folder(tmp_path, train).find({"step": object()})


def test_runs_of_an_older_function_are_told_and_made_again(tmp_path: Path) -> None:
    Folder(tmp_path, made(PROGRAM)).add(record(ranks=2))
    changed = Folder(tmp_path, made(PROGRAM.replace("FACTOR = 3", "FACTOR = 4")))
    with pytest.warns(UserWarning, match=r"train\(\) changed since 1 run in .* was made: made ag"):
        changed.tell_outdated([{"ranks": 2}, {"ranks": 4}])
    assert changed.find({"ranks": 2}) is None
    with warnings.catch_warnings():  # the old one is found as it was
        warnings.simplefilter("error")
        Folder(tmp_path, made(PROGRAM)).tell_outdated([{"ranks": 2}])


def test_runs_under_other_trouble_are_others(tmp_path: Path) -> None:
    Folder(tmp_path, train).add(record(ranks=2))
    with dk.trouble(latency=0.1):
        slow = Folder(tmp_path, train)
    assert slow.find({"ranks": 2}) is None
    with pytest.warns(UserWarning, match="trouble changed"):
        slow.tell_outdated([{"ranks": 2}])


def test_a_line_that_was_being_written_is_made_again(tmp_path: Path) -> None:
    for ranks in (1, 2):
        Folder(tmp_path, train).add(record(ranks=ranks))
    lines = tmp_path.joinpath(RUNS).read_text()
    tmp_path.joinpath(RUNS).write_text(lines[:-20])
    kept = Folder(tmp_path, train)
    assert kept.find({"ranks": 1}) and kept.find({"ranks": 2}) is None
    kept.add(record(ranks=2))
    assert Folder(tmp_path, train).find({"ranks": 2})


@pytest.mark.parametrize("bad", ["{}\n", "hello\n", "[1]\n", '{"setting": 1, "by": 2}\n'])
def test_a_damaged_line_is_named(tmp_path: Path, bad: str) -> None:
    Folder(tmp_path, train).add(record(ranks=1))
    with tmp_path.joinpath(RUNS).open("a") as file:
        file.write(bad)
    with pytest.raises(DistkitError, match=r"runs.jsonl, line 2: .* Remove the line"):
        Folder(tmp_path, train)


def test_a_damaged_trace_is_made_again(tmp_path: Path) -> None:
    Folder(tmp_path, train).add(record(ranks=1))
    (file,) = tmp_path.glob("*.trace")
    file.write_bytes(file.read_bytes()[:30])
    with pytest.warns(UserWarning, match="made again"):
        assert Folder(tmp_path, train).find({"ranks": 1}) is None


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    tmp_path.joinpath("x").write_text("")
    with pytest.raises(DistkitError, match=r"sweep\(folder='.*x'\): File exists"):
        Folder(tmp_path / "x", train)


# -- the frame ---------------------------------------------------------------------


def frame() -> Sweep:
    failed = Record({"ranks": 2, "batch": 16}, SavedRun(trace(3)), {}, outcome="RankError")
    records = [record(0.1 * r, ranks=r, batch=b) for r in (1, 2) for b in (8, 16)]
    return Sweep.of("train", [*records, failed])


def test_the_frame_has_a_row_per_run_and_its_trace() -> None:
    made = frame()
    assert made.columns.tolist() == [
        *("ranks", "batch", "seconds", "messages", "loss", "outcome", "trace")
    ]
    assert made.outcome.tolist() == ["ok"] * 4 + ["RankError"]
    assert made.trace[4].ranks == [3]
    assert "Event" not in str(made) and "Event" not in made._repr_html_()


def test_a_part_of_the_frame_draws_itself_too() -> None:
    part = frame()[frame().batch == 16]
    assert len(part) == 3 and "1 not to the end" in part._repr_html_()
    axes = part.chart("loss").axes[0]
    assert (axes.get_title(loc="left"), axes.get_xlabel()) == ("loss", "ranks")
    assert [*axes.lines[0].get_xdata()] == [1, 2]
    with pytest.raises(ValueError, match="cannot be plotted"):
        part.chart("accuracy")


def test_what_is_computed_from_it_is_a_plain_frame() -> None:
    whole = frame()
    for made in (
        whole[["ranks", "loss"]],
        whole.groupby("ranks")[["loss"]].mean(),
        (2 * whole[:4].pivot(index="batch", columns="ranks", values=["loss"])).round(2),
    ):
        assert "<table" in made._repr_html_() and "loss" in str(made)
