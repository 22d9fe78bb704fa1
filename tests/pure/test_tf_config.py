"""``TF_CONFIG``: each field's error, and the place in a cluster."""

from __future__ import annotations

import json

import pytest

from distkit.errors import StrategyError
from distkit.strategies.tf_config import TFConfig

HOSTS = {"chief": ["a:1"], "worker": ["b:1", "c:1"], "ps": ["d:1"]}


def parse(cluster, task) -> TFConfig:
    return TFConfig.parse(json.dumps({"cluster": cluster, "task": task}))


@pytest.mark.parametrize(
    ("kind", "index", "rank"),
    [("chief", 0, 0), ("worker", 0, 1), ("worker", 1, 2), ("ps", 0, None), ("evaluator", 0, None)],
)
def test_each_tasks_rank(kind: str, index: int, rank: int | None) -> None:
    found = parse(HOSTS, {"type": kind, "index": index})
    assert (found.rank, found.is_chief) == (rank, rank == 0)
    assert (found.world_size, found.master) == (3, "a:1")
    assert found.layout == {"workers": 3, "servers": 1}


def test_without_a_chief_worker_0_is_it() -> None:
    found = parse({"worker": ["a:1", "b:1"]}, {"type": "worker", "index": 0})
    assert (found.rank, found.is_chief, found.world_size) == (0, True, 2)
    assert TFConfig.parse('{"cluster": {"worker": ["a:1"]}}').is_chief


def test_bad_json_is_placed() -> None:
    with pytest.raises(StrategyError) as caught:
        TFConfig.parse('{"cluster": {\n  "worker": [a:1]}}')
    said, line, marker = str(caught.value).splitlines()
    assert said.endswith("in line 2, column 14:")
    assert line == '      "worker": [a:1]}}'
    assert line[marker.index("^")] == "a"


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ([], "the whole: a list"),
        ({}, 'cluster: must be {"worker"'),
        ({"cluster": {"worker": ["a:1"]}, "tasks": 1}, "tasks: unknown"),
        ({"cluster": {"workers": ["a:1"]}}, "cluster.workers: no such kind of task"),
        ({"cluster": {"worker": "a:1"}}, "cluster.worker: must be a list of addresses, not a str"),
        ({"cluster": {"worker": ["a:1", "b"]}}, "cluster.worker[1]: 'b' is not host:port"),
        ({"cluster": {"worker": ["a:70000"]}}, "cluster.worker[0]: 'a:70000' is not host:port"),
        ({"cluster": {"chief": ["a:1", "b:1"]}}, "cluster.chief: has 2 addresses"),
        ({"cluster": {"ps": ["a:1"]}}, "cluster: has neither a chief nor a worker"),
        ({"cluster": {"worker": ["a:1", "b:1"]}}, "task: must be"),
        ({"cluster": HOSTS, "task": {"type": "boss", "index": 0}}, "task.type: 'boss' is not in"),
        ({"cluster": HOSTS, "task": {"type": "worker", "index": 2}}, "2; there is worker 0 to 1"),
        ({"cluster": HOSTS, "task": {"type": "chief", "index": "0"}}, "'0'; there is chief 0"),
        ({"cluster": HOSTS, "task": {"type": "worker"}}, "task.index: None"),
    ],
)
def test_each_wrong_field_is_named(found, words: str) -> None:
    with pytest.raises(StrategyError) as caught:
        TFConfig.parse(json.dumps(found))
    assert words in str(caught.value)


def test_all_wrong_fields_are_told_at_once() -> None:
    with pytest.raises(StrategyError, match="3 wrong fields"):
        parse({"worker": ["a", "b"]}, {"type": "worker", "index": 5})


def test_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    assert TFConfig.from_environment() is None
    monkeypatch.setenv("TF_CONFIG", '{"cluster": {"worker": ["a:1"]}}')
    assert TFConfig.from_environment().world_size == 1
