"""Untrusted trace files either work everywhere, or raise an error that names the field."""

from __future__ import annotations

import copy
import gzip
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import traces

import distkit as dk
from distkit import Trace
from distkit.errors import TraceFileError
from distkit.events import Event, Op, State

END = {"how": "raised", "text": "ValueError: x", "where": "a.py:3"}
REPLACED = {"node": 2, "name": "server 0", "how": "killed", "time": 4711.26}


def with_all_fields(trace: Trace, **fields: Any) -> Trace:
    """Return the trace with a value in each field of its info."""
    values = {
        "groups": {"world": [0, 1], "1": [0, 1]},
        "dropped": {"0": 3, "notebook": 2},
        "without_values": {"1": 4},
        "unwaited": {"0": [0]},
        "replaced": [REPLACED],
        "ends": {"0": {"how": "returned", "text": "", "where": ""}, "1": END},
        "sources": {"p2p.py": "x = 1\n" * 20},
        "until": 4712.0,
        "device": "cpu",
    }
    touch = Event(
        0,
        500,
        Op.TOUCH,
        State.STARTED,
        4712.0,
        where="a.py:1",
        attributes={"function": "add"},
        match="3",
    )
    return Trace([*trace.events, touch], traces.info(trace.info, **{**values, **fields}))


FILES = [
    traces.ping_pong(1),
    with_all_fields(traces.ping_pong(1), ends={}),
    traces.ring(3),
    with_all_fields(traces.ring(3)),
    with_all_fields(traces.parameter_server(1)),
    traces.sync_sgd(2, 1),
]

UNUSUAL = [
    None,
    True,
    -1,
    0,
    1,
    7,
    10**12,
    2**63,
    0.5,
    float("nan"),
    "",
    "x",
    "-1",
    "\ud800",
    [],
    [1],
    {},
    {"a": 1},
    [[]],
    [None],
    99_999,
    "send",
    "completed",
    "world",
]


def lines_of(path: Path) -> list[Any]:
    return [json.loads(line) for line in gzip.decompress(path.read_bytes()).decode().splitlines()]


def write(path: Path, lines: list[Any]) -> Path:
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, lines)).encode(), 1))
    return path


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Generate the paths to a value and to all values nested in it."""
    yield path
    if isinstance(value, (dict, list)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from paths(item, (*path, key))


def damage(lines: list[Any], rng: random.Random) -> None:
    """Delete a value, or replace it with an unusual one or with another value of its line."""
    line = rng.choice([line for line in lines if line])
    nested = list(paths(line))[1:]
    path, other = rng.choice(nested), line
    for key in rng.choice(nested):
        other = other[key]
    inside = line
    for key in path[:-1]:
        inside = inside[key]
    how = rng.random()
    if how < 0.2:
        del inside[path[-1]]
    else:
        inside[path[-1]] = copy.deepcopy(rng.choice(UNUSUAL) if how < 0.6 else other)


def use(trace: Trace, folder: Path) -> None:
    """Diagnose, convert, save, load and draw the trace."""
    assert repr(trace)
    trace.diagnose()
    trace.to_dataframe()
    assert len(Trace.load(trace.save(folder / "again.trace"))) == len(trace)
    trace.to_chrome(folder / "x.json")
    trace.to_html(folder / "x.html")
    for view in (dk.Timeline, dk.Stage, dk.Tensors, dk.Gradients, dk.Servers):
        assert view(trace)._svg()
    assert dk.Compare({"a": trace, "b": trace})._svg()


@pytest.mark.parametrize("seed", range(10))
def test_damaged_file_loads_or_raises(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    opened = 0
    while opened < 2:
        lines = lines_of(rng.choice(FILES).save(tmp_path / "x.trace"))
        for _ in range(rng.choice([1, 1, 2])):
            damage(lines, rng)
        try:
            trace = Trace.load(write(tmp_path / "x.trace", lines))
        except TraceFileError as error:
            assert "x.trace: " in str(error)
        else:
            use(trace, tmp_path)
            opened += 1


INVALID_VALUES = [
    ("categories[0][8]", ("categories", 0, 8), 7),
    ("categories[0][3]", ("categories", 0, 3), [1]),
    ("categories[0][4]", ("categories", 0, 4), "8"),
    ("categories[0][4]", ("categories", 0, 4), [8]),
    ("categories[0][5][0]", ("categories", 0, 5), [[2]]),
    ("time[0]", ("time", 0), [1]),
    ("rank[0]", ("rank", 0), 10**9),
    ("rank[0]", ("rank", 0), -1),
    ("summary[0][1]", ("summary", 0, 1), None),
    ("match[0][1]", ("match",), [[0, 3]]),
    ("meta.world_size", ("meta", "world_size"), 10**12),
    ("meta.replaced[0]", ("meta", "replaced"), ["rank 0"]),
    ("meta.ends[...].how", ("meta", "ends", "1", "how"), "fled"),
    ("meta.groups[...][1]", ("meta", "groups", "1"), [0, "1"]),
    ("meta.ranks", ("meta", "ranks"), {"first": {}}),
    ("meta", ("meta",), None),
    ("events", ("events",), "4"),
    ("version", ("version",), "2"),
]


@pytest.mark.parametrize(("field", "path", "value"), INVALID_VALUES)
def test_error_names_the_field(
    tmp_path: Path, field: str, path: tuple[Any, ...], value: Any
) -> None:
    lines = lines_of(FILES[3].save(tmp_path / "x.trace"))
    (inside,) = [line for line in lines if path[0] in line]
    for key in path[:-1]:
        inside = inside[key]
    inside[path[-1]] = value
    with pytest.raises(TraceFileError, match=rf"x\.trace: .* `\$\.{re.escape(field)}`"):
        Trace.load(write(tmp_path / "x.trace", lines))


def test_deep_nesting_raises(tmp_path: Path) -> None:
    file = tmp_path / "x.trace"
    file.write_bytes(gzip.compress(b'{"meta": ' + b"[" * 100_000))
    with pytest.raises(TraceFileError, match=r"x\.trace: "):
        Trace.load(file)
