"""Sweeps without ranks: whether a function is the same, what a folder keeps, what a frame shows."""

from __future__ import annotations

import importlib
import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from gpus import some_gpus

import distkit as dk
from distkit.cluster.cluster import Cluster
from distkit.cluster.plan import make_plan
from distkit.errors import DistkitError
from distkit.events import Event, Op, State
from distkit.trace.trace import Trace
from distkit_experiments.experiment import Clusters
from distkit_experiments.fingerprint import fingerprint
from distkit_experiments.folder import RUNS, Folder
from distkit_experiments.results import Record, SavedRun
from distkit_experiments.sweep import Sweep

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


WRAPPED = """
import functools
import torch
import helpers
from torch.utils.data import TensorDataset
class Base(torch.nn.Module):
    def forward(self, x):
        return x + 11
class Model(Base):
    @staticmethod
    def half(x):
        return x / 2
    @classmethod
    def twice(cls, x):
        return x * 12
    @property
    def width(self):
        return 13
    @functools.cached_property
    def height(self):
        return 14
@torch.no_grad()
def helper(x):
    return x - 15
@functools.lru_cache
def cached(x):
    return x ** 10
added = functools.partial(lambda x, y: x + y, 17)
class Rate:
    def __init__(self):
        self.value = 18
    def __call__(self):
        return 19 * self.value
data, rate = TensorDataset(torch.full((3,), 20.0)), Rate()
net = torch.nn.Sequential(torch.nn.Linear(2, 2))
torch.nn.init.constant_(net[0].weight, 21)
torch.nn.init.zeros_(net[0].bias)
bound, few = Model().forward, torch.tensor([22.0], dtype=torch.bfloat16)
@torch.no_grad()
def train():
    helpers.f(cached(helper(23)), added, rate, data, net, bound, few)
    return Model()
"""


@pytest.fixture
def helpers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Write the reader's helpers.py, which programs import."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("sys.dont_write_bytecode", True)

    def write(text: str) -> None:
        tmp_path.joinpath("helpers.py").write_text(text)
        monkeypatch.delitem(sys.modules, "helpers", raising=False)
        importlib.invalidate_caches()

    write("def f(*x):\n    return g(x, 1)\ndef g(x, y):\n    return x")
    return write


@pytest.mark.parametrize(
    ("old", "new"),
    [("no_grad()\ndef h", "enable_grad()\ndef h"), ("x / 2", "x / 3")]
    + [(str(n), str(n + 20)) for n in range(10, 24) if n != 16],
)
def test_a_change_of_what_is_decorated_inherited_or_in_an_object_is_noticed(
    helpers: Callable[[str], None], old: str, new: str
) -> None:
    assert WRAPPED.count(old) == 1
    assert fingerprint(made(WRAPPED)) != fingerprint(made(WRAPPED.replace(old, new)))


def test_a_change_of_the_readers_own_module_is_noticed(helpers: Callable[[str], None]) -> None:
    before = fingerprint(made(WRAPPED))
    helpers("# a comment\ndef f(*x):\n    return g(x, 1)\n\ndef g(x, y):\n    return x")
    assert fingerprint(made(WRAPPED)) == before
    helpers("def f(*x):\n    return g(x, 1)\ndef g(x, y):\n    return y")
    assert fingerprint(made(WRAPPED)) != before


def test_networks_data_and_objects_are_the_same_in_every_session(
    helpers: Callable[[str], None],
) -> None:
    first, second = made(WRAPPED), made(WRAPPED)  # both live: at other addresses
    assert fingerprint(first) == fingerprint(second)


def test_a_long_chain_of_functions_is_not_too_deep() -> None:
    chain = "".join(f"def f{n}(): return f{n + 1}()\n" for n in range(2000))
    program = chain + "def f2000(): return 1\ndef train(): return f0()"
    changed = program.replace("return 1\n", "return 2\n")
    assert fingerprint(made(program)) != fingerprint(made(changed))


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


def opened(path: Path, fn: Callable[..., Any], **asked: Any) -> Folder:
    """A folder of runs on a machine with 8 GPUs."""
    wish: dict[str, Any] = {"servers": 0, "device": "cpu", "backend": "auto"} | asked
    machine: dict[str, Any] = {"cpus": 8, "memory": 10**12, "gpus": some_gpus(8)}
    return Folder(path, fn, lambda ranks: make_plan(ranks, **wish, **machine))


def train(batch: int = 8) -> None: ...


def other(batch: int = 8) -> None:
    print(batch)


def test_what_was_kept_is_found_again(tmp_path: Path) -> None:
    opened(tmp_path / "new", train).add(record(ranks=2, batch=8))
    found = opened(tmp_path / "new", train).find({"batch": 8, "ranks": 2})
    assert found is not None
    assert (found.values, found.measured) == ({"loss": 0.5}, {"seconds": 1.5, "messages": 3})
    assert found.run.trace.events == trace().events
    assert opened(tmp_path / "new", train).find({"batch": 16, "ranks": 2}) is None
    assert opened(tmp_path / "new", other).find({"batch": 8, "ranks": 2}) is None


def test_functions_are_recognized_as_values(tmp_path: Path) -> None:
    opened(tmp_path, train).add(record(ranks=2, step=other))
    assert opened(tmp_path, train).find({"ranks": 2, "step": other})
    assert opened(tmp_path, train).find({"ranks": 2, "step": train}) is None
    with pytest.raises(TypeError, match="cannot recognize step=<object"):
        opened(tmp_path, train).find({"step": object()})


def test_runs_of_an_older_function_are_told_and_made_again(tmp_path: Path) -> None:
    opened(tmp_path, made(PROGRAM)).add(record(ranks=2))
    changed = opened(tmp_path, made(PROGRAM.replace("FACTOR = 3", "FACTOR = 4")))
    with pytest.warns(UserWarning, match=r"train\(\) changed since 1 run in .* was made: made ag"):
        changed.tell_outdated([{"ranks": 2}, {"ranks": 4}])
    assert changed.find({"ranks": 2}) is None
    with warnings.catch_warnings():  # the old one is found as it was
        warnings.simplefilter("error")
        opened(tmp_path, made(PROGRAM)).tell_outdated([{"ranks": 2}])


def test_runs_under_other_trouble_are_others(tmp_path: Path) -> None:
    opened(tmp_path, train).add(record(ranks=2))
    with dk.trouble(latency=0.1):
        slow = opened(tmp_path, train)
    assert slow.find({"ranks": 2}) is None
    with pytest.warns(UserWarning, match="trouble changed"):
        slow.tell_outdated([{"ranks": 2}])


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"device": "cuda"}, "device and backend"),
        ({"device": "cuda", "backend": "gloo"}, "device changed"),
        ({"servers": 2}, "servers and threads"),
        ({"threads": 1}, "threads"),
    ],
)
def test_runs_on_another_cluster_are_others(
    tmp_path: Path, asked: dict[str, Any], said: str
) -> None:
    opened(tmp_path, train).add(record(ranks=2))
    other = opened(tmp_path, train, **asked)
    with pytest.warns(UserWarning, match=said):
        other.tell_outdated([{"ranks": 2}])
    assert other.find({"ranks": 2}) is None
    other.add(record(0.25, ranks=2))
    found = [opened(tmp_path, train, **wish).find({"ranks": 2}) for wish in ({}, asked)]
    assert [kept and kept.values for kept in found] == [{"loss": 0.5}, {"loss": 0.25}]


def test_runs_of_another_distkit_are_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened(tmp_path, train).add(record(ranks=2))
    monkeypatch.setattr(dk, "__version__", "99")
    assert opened(tmp_path, train).find({"ranks": 2}) is None


def test_a_sweep_knows_the_plan_of_its_clusters() -> None:
    class Given:
        plan = make_plan(2, 1, "cpu", "gloo", cpus=8, memory=10**12, threads=3)

    clusters = Clusters(cast(Cluster, Given()))
    assert clusters.plan(2) is Given.plan
    assert clusters.plan(100_000).devices == ("cpu",) * 100_000  # whatever memory is free


def test_a_line_that_was_being_written_is_made_again(tmp_path: Path) -> None:
    for ranks in (1, 2):
        opened(tmp_path, train).add(record(ranks=ranks))
    lines = tmp_path.joinpath(RUNS).read_text()
    tmp_path.joinpath(RUNS).write_text(lines[:-20])
    kept = opened(tmp_path, train)
    assert kept.find({"ranks": 1}) and kept.find({"ranks": 2}) is None
    kept.add(record(ranks=2))
    assert opened(tmp_path, train).find({"ranks": 2})


def test_an_index_on_a_full_disk_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened(tmp_path, train).add(record(ranks=1))
    with tmp_path.joinpath(RUNS).open("a") as file:
        file.write('{"name"')

    def full(path: Path, *_: Any, **__: Any) -> int:
        path.open("w").close()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    assert opened(tmp_path, train).find({"ranks": 1})


GOOD = {"name": "train()", "setting": {}, "by": {}, "measured": {}, "values": {}, "trace": "x"}


@pytest.mark.parametrize(
    "bad",
    [b"{}", b"hello", b"[1]", b'{"setting": 1, "by": 2}', b'{"name": "\xff"}', b"[" * 100_000]
    + [json.dumps({k: v for k, v in GOOD.items() if k != name}).encode() for name in GOOD]
    + [json.dumps({**GOOD, name: [1]}).encode() for name in ("by", "measured", "values")],
)
def test_a_damaged_line_is_named(tmp_path: Path, bad: bytes) -> None:
    opened(tmp_path, train).add(record(ranks=1))
    with tmp_path.joinpath(RUNS).open("ab") as file:
        file.write(bad + b"\n")
    with pytest.raises(DistkitError, match=r"runs.jsonl, line 2: .* Remove the line"):
        opened(tmp_path, train)


def test_a_damaged_trace_is_made_again(tmp_path: Path) -> None:
    opened(tmp_path, train).add(record(ranks=1))
    (file,) = tmp_path.glob("*.trace")
    file.write_bytes(file.read_bytes()[:30])
    with pytest.warns(UserWarning, match="made again"):
        assert opened(tmp_path, train).find({"ranks": 1}) is None


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    tmp_path.joinpath("x").write_text("")
    with pytest.raises(DistkitError, match=r"sweep\(folder='.*x'\): File exists"):
        opened(tmp_path / "x", train)


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
