"""What a machine says of itself: cgroups, GPUs, packages; and the messages between machines."""

from __future__ import annotations

import ctypes
import math
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from gpus import Device, Nvml

from distkit import probe
from distkit.cluster import limits


@pytest.mark.parametrize(
    ("mine", "files", "quota", "left"),
    [
        ("", {}, math.inf, math.inf),
        (
            "0::/",
            {"cpu.max": "max 100000", "memory.max": "max", "memory.current": "5"},
            math.inf,
            math.inf,
        ),
        (
            "0::/",
            {"cpu.max": "150000 100000", "memory.max": "900", "memory.current": "200"},
            1.5,
            700,
        ),
        (
            "4:memory:/docker/of-the-host\n1:cpu,cpuacct:/docker/of-the-host",
            {
                "cpu/cpu.cfs_quota_us": "50000",
                "cpu/cpu.cfs_period_us": "100000",
                "memory/memory.limit_in_bytes": "100",
                "memory/memory.usage_in_bytes": "300",
            },
            0.5,
            0,
        ),
        (
            "0::/system.slice/jupyter-ada.service",
            {
                "system.slice/cpu.max": "300000 100000",
                "system.slice/jupyter-ada.service/cpu.max": "max 100000",
                "system.slice/memory.max": "max",
                "system.slice/memory.current": "5000",
                "system.slice/jupyter-ada.service/memory.max": "1000",
                "system.slice/jupyter-ada.service/memory.current": "900",
                "system.slice/jupyter-ada.service/memory.stat": "anon 300\ninactive_file 600",
            },
            3,
            700,
        ),
    ],
    ids=["none", "unlimited", "v2", "v1", "a service"],
)
def test_what_a_cgroup_allows(
    mine: str,
    files: dict[str, str],
    quota: float,
    left: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(probe, "_CGROUP", tmp_path)
    monkeypatch.setattr(probe, "_MINE", tmp_path / "mine")
    for name, text in {**files, "mine": mine}.items():
        tmp_path.joinpath(name).parent.mkdir(exist_ok=True, parents=True)
        tmp_path.joinpath(name).write_text(text + "\n")
    assert (probe.cpu_quota(), probe.cgroup_memory()) == (quota, left)
    assert limits.cpus() == max(1, math.ceil(min(quota, probe.usable_cores())))
    assert limits.memory() == left if left < math.inf else limits.memory() > 0


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Iterator[Nvml]:
    """The driver's library, with GPUs that the test gives it."""
    library = Nvml()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    probe._nvml.cache_clear()
    yield library
    probe._nvml.cache_clear()


def test_gpus(nvml: Nvml) -> None:
    nvml.gpus = [Device("GPU-a"), Device("GPU-b", lost=True), Device("GPU-c", slices=2)]
    nvml.users = {4711: 1 << 30, 4712: (1 << 64) - 1}
    found = probe.gpus()
    whole = {"name": "NVIDIA H200", "total": 100, "free": 60}
    assert found["found"] == [
        {"index": 0, "uuid": "GPU-a", **whole},
        {"index": 1, "error": "GPU is lost"},
        {
            "index": 2,
            "uuid": "GPU-c",
            **whole,
            "slices": [{"uuid": f"MIG-GPU-c{n}", **whole} for n in range(2)],
        },
    ]
    assert (found["driver"], found["cuda"], found["visible"]) == ("580.65.06", [13, 0], None)
    assert probe.holders("GPU-a") == {4711: 1 << 30, 4712: 0}
    assert probe.holders("GPU-x") == {}


def test_a_driver_that_does_not_fit(nvml: Nvml) -> None:
    nvml.code = 18
    assert probe.gpus()["error"] == "Driver/library version mismatch"


def test_gpus_without_nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    probe._nvml.cache_clear()
    monkeypatch.setattr(ctypes, "CDLL", missing)
    monkeypatch.setattr(probe, "_DRIVER", tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert (probe.gpus()["found"], probe.gpus()["visible"]) == ([], "0")
    folder = tmp_path / "gpus" / "0000:18:00.0"
    folder.mkdir(parents=True)
    folder.joinpath("information").write_text(
        "Model: \t\t NVIDIA H200\nIRQ:   \t\t 16\nGPU UUID: \t GPU-a\n"
    )
    gpu = {"index": 0, "name": "NVIDIA H200", "uuid": "GPU-a", "total": 0, "free": 0}
    assert probe.gpus()["found"] == [gpu]
    assert probe.holders("GPU-a") == {}


def test_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not what is installed counts, but what an import would find."""
    monkeypatch.syspath_prepend(tmp_path)
    assert probe.package("a_package_of_a_test") is None
    folder = tmp_path / "a_package_of_a_test"
    folder.mkdir()
    assert probe.package(folder.name) is None  # nothing is in it
    folder.joinpath("__init__.py").write_text('"""Doc."""\n__version__ = "1.2.3"\n')
    assert probe.package(folder.name) == "1.2.3"
    before = probe.digest(folder.name)
    folder.joinpath("more.py").write_text("x = 1\n")
    assert len({before, probe.digest(folder.name), probe.digest("no_such_package")}) == 3


def test_a_folder_that_is_not_there() -> None:
    assert probe.room("/no/such/folder")["error"] == "No such file or directory"
    assert probe.room("/")["size"] > 0


def test_names() -> None:
    assert probe.resolve("localhost")["addresses"] == ["127.0.0.1"]
    assert "error" in probe.resolve("no-such-host.invalid")
    assert probe.route("127.0.0.1")["interface"] == "lo"


def test_who_is_too_slow_is_left_out() -> None:
    never = threading.Event()
    assert probe.at_once(lambda n: n or never.wait(), [0, 1, 2], 0.5) == {1: 1, 2: 2}
    never.set()


def test_only_those_with_the_secret_are_served() -> None:
    alice, bob = probe.Probe(), probe.Probe()
    ports = alice.do_listen(["127.0.0.1"], [0], "secret")
    to = ["127.0.0.1", ports["127.0.0.1"]["0"]]
    bob.do_listen([], [], "secret")
    assert bob.do_reach({"alice": to}) == {"alice": ""}
    assert bob.do_shout("bob", {"alice": [*to, [256]]}) == {"alice": {"256": ""}}
    assert alice.do_heard({"bob": [256]}, 10.0) == {"bob": [256]}
    measured = bob.do_measure(*to, sizes=[1, 4096], seconds=0.05)
    assert set(measured["samples"]) == {"1", "4096"}
    mallory = probe.Probe()
    mallory.do_listen([], [], "sesame")
    assert mallory.do_reach({"alice": to})["alice"] in (
        "another program answers",
        "connection reset by peer",
    )
    mallory.do_shout("mallory", {"alice": [*to, [256]]})
    assert "mallory" not in alice.do_heard({"mallory": [256]}, 0.1)


def test_a_slow_message_is_not_sent_again_and_again() -> None:
    known = {"1": [1e-3], "65536": [0.1]}
    assert probe._is_short(known, 65536, 0.6)
    assert probe._is_short(known, 1 << 17, 0.6)
    assert not probe._is_short(known, 1 << 20, 0.6)


def test_what_fails_is_said() -> None:
    answer = probe.Probe().answer({"do": "measure", "address": "x"})
    assert answer["error"].startswith("TypeError: ")
    closed = socket.create_server(("127.0.0.1", 0))
    port = closed.getsockname()[1]
    closed.close()
    reached = probe.Probe().do_reach({"nobody": ["127.0.0.1", port]})
    assert reached == {"nobody": os.strerror(111).lower()}
