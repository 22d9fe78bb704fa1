"""``TF_CONFIG``: invalid fields, and the position in a cluster."""

from __future__ import annotations

import json
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distkit.errors import StrategyError
from distkit_strategies import MultiWorkerMirroredStrategy, TFConfig
from distkit_strategies.tf_config import TASKS

HOSTS = {"chief": ["a:1"], "worker": ["b:1", "c:1"], "ps": ["d:1"]}


def parse(cluster, task) -> TFConfig:
    return TFConfig.parse(json.dumps({"cluster": cluster, "task": task}))


@pytest.mark.parametrize(
    ("kind", "index", "rank"),
    [("chief", 0, 0), ("worker", 0, 1), ("worker", 1, 2), ("ps", 0, None), ("evaluator", 0, None)],
)
def test_task_determines_the_rank(kind: str, index: int, rank: int | None) -> None:
    found = parse(HOSTS, {"type": kind, "index": index})
    assert (found.rank, found.is_chief) == (rank, rank == 0)
    assert (found.world_size, found.master) == (3, "a:1")
    assert found.layout == {"workers": 3, "servers": 1}


def test_worker_0_is_chief_by_default() -> None:
    found = parse({"worker": ["a:1", "b:1"]}, {"type": "worker", "index": 0})
    assert (found.rank, found.is_chief, found.world_size) == (0, True, 2)
    for kind in ("chief", "worker"):
        single = TFConfig.parse(json.dumps({"cluster": {kind: ["a:1"]}}))
        assert (single.type, single.rank, single.is_chief) == (kind, 0, True)


def test_json_error_names_the_position() -> None:
    with pytest.raises(StrategyError) as caught:
        TFConfig.parse('{"cluster": {\n  "worker": [a:1]}}')
    message, line, marker = str(caught.value).splitlines()
    assert message.endswith("on line 2, column 14:")
    assert line == '      "worker": [a:1]}}'
    assert line[marker.index("^")] == "a"


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ([], "Expected `object`, got `array`"),
        ({"task": {"type": "worker", "index": 1}}, "cluster: it needs a chief or a worker"),
        ({"cluster": {"worker": ["a:1", "A:1"]}}, "['a:1'] in cluster: each task needs a"),
        ({"cluster": HOSTS | {"ps": ["c:1"]}}, "['c:1'] in cluster: each task needs a different"),
        ({"cluster": {"worker": None}}, "Expected `array`, got `null` - at `$.cluster.worker`"),
        ({"cluster": {"worker": ["a:²"]}}, "at `$.cluster.worker[0]`"),
        ({"cluster": HOSTS, "task": {"type": [], "index": 0}}, "at `$.task.type`"),
        ({"cluster": HOSTS, "task": {"type": "worker", "index": True}}, "at `$.task.index`"),
        ({"cluster": HOSTS, "task": {"type": "worker", "index": "-1"}}, "`int` >= 0"),
        ({"cluster": {"worker": ["a:1"]}, "tasks": 1}, "unknown field `tasks`"),
        ({"cluster": {"workers": ["a:1"]}}, "unknown field `workers` - at `$.cluster`"),
        ({"cluster": {"worker": ["a:1", "b"]}}, "at `$.cluster.worker[1]`"),
        ({"cluster": {"worker": ["a:70000"]}}, "['a:70000'] in cluster: a port must be a number"),
        ({"cluster": {"chief": ["a:1", "b:1"]}}, "length <= 1 - at `$.cluster.chief`"),
        ({"cluster": {"ps": ["a:1"]}}, "cluster: it needs a chief or a worker"),
        ({"cluster": {"worker": ["a:1", "b:1"]}}, "task: must be"),
        ({"cluster": HOSTS, "task": {"type": "boss", "index": 0}}, "Invalid enum value 'boss'"),
        ({"cluster": HOSTS, "task": {"type": "worker", "index": 2}}, "worker 2 does not exist"),
        ({"cluster": HOSTS, "task": {"type": "chief", "index": "1"}}, "chief 1 does not exist"),
        ({"cluster": HOSTS, "task": {"type": "worker"}}, "missing required field `index`"),
    ],
)
def test_invalid_field_is_named(found, message: str) -> None:
    with pytest.raises(StrategyError, match="TF_CONFIG has an invalid field") as caught:
        TFConfig.parse(json.dumps(found))
    assert message in str(caught.value)


@pytest.mark.parametrize("found", [{}, {"rpc_layer": "grpc"}, {"environment": "cloud"}])
def test_config_without_a_cluster_is_one_process(found, monkeypatch: pytest.MonkeyPatch) -> None:
    config = TFConfig.parse(json.dumps(found))
    assert (config.rank, config.world_size, config.is_chief, config.master) == (0, 1, True, "")
    assert config.layout == {"workers": 1, "servers": 0}
    monkeypatch.setenv("TF_CONFIG", json.dumps(found))
    assert MultiWorkerMirroredStrategy().num_replicas_in_sync == 1


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just("a:1"),
    lambda part: st.lists(part) | st.dictionaries(st.sampled_from(TASKS) | st.text(), part),
    max_leaves=6,
)
MAYBE = st.sampled_from([[], ["a:1"], ["a:1", "b:2"], "worker", "0", 0]) | JSON
CONFIG = st.fixed_dictionaries(
    {},
    optional={
        "cluster": st.dictionaries(st.sampled_from(TASKS), MAYBE, max_size=3) | JSON,
        "task": st.fixed_dictionaries({}, optional={"type": MAYBE, "index": MAYBE}) | JSON,
        "rpc_layer": JSON,
    },
)


@given(CONFIG | JSON)
def test_any_json_parses_or_raises(found) -> None:
    try:
        config = TFConfig.parse(json.dumps(found))
    except StrategyError as error:
        assert "TF_CONFIG has" in str(error)
    else:
        assert config.rank is None or 0 <= config.rank < config.world_size
        assert config.layout["workers"] == config.world_size
        addresses = [address for hosts in config.cluster.values() for address in hosts]
        assert len(addresses) == len({*addresses})


@pytest.mark.parametrize("text", ["[" * 100_000, "9" * 5000, "\ufeff{}", '{"cluster":\u2028{]}'])
def test_undecodable_text_raises(text: str) -> None:
    with pytest.raises(StrategyError, match="TF_CONFIG is not valid JSON"):
        TFConfig.parse(text)


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("192.0.2.1:5000", "cannot use 192.0.2.1:5000: "),
        ("[2001:db8::1]:5000", "cannot use [2001:db8::1]:5000: "),
        ("no.such.machine.invalid:5000", "cannot use no.such.machine.invalid:5000: "),
        (f"{'x' * 70}.invalid:5000", "cannot use xxxx"),
    ],
)
def test_address_of_another_machine_raises(
    address: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {"cluster": {"worker": [address, "b:1"]}, "task": {"type": "worker", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    with pytest.raises(StrategyError, match=r"the task worker 0 at .* Check task") as caught:
        MultiWorkerMirroredStrategy()
    assert message in str(caught.value)


def test_occupied_port_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        cluster = {"worker": [f"127.0.0.1:{other.getsockname()[1]}"]}
        monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster}))
        with pytest.raises(StrategyError, match="Address already in use"):
            MultiWorkerMirroredStrategy()


def test_environment_variable_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    assert TFConfig.from_environment() is None
    monkeypatch.setenv("TF_CONFIG", '{"cluster": {"worker": ["a:1"]}}')
    assert TFConfig.from_environment().world_size == 1
