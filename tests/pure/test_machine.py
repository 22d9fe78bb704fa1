"""Limits of a machine: CPUs and memory from cgroups, GPUs from nvidia-smi."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from distkit.cluster import machine


@pytest.mark.parametrize(
    ("own_cgroup", "files", "quota", "free"),
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
    ids=["none", "unlimited", "limited", "a service"],
)
def test_cgroup_limits_are_read(
    own_cgroup: str,
    files: dict[str, str],
    quota: float,
    free: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)
    monkeypatch.setattr(machine, "_PROC_CGROUP", tmp_path / "mine")
    for name, text in {**files, "mine": own_cgroup}.items():
        tmp_path.joinpath(name).parent.mkdir(exist_ok=True, parents=True)
        tmp_path.joinpath(name).write_text(text + "\n")
    assert (machine.cpu_quota(), machine.cgroup_memory()) == (quota, free)
    assert machine.cpus() == max(1, math.ceil(min(quota, machine.usable_cores())))
    assert machine.memory() == free if free < math.inf else machine.memory() > 0


#: A fake nvidia-smi that prints a file.
SMI = """#!/bin/sh
case "$1" in
    --query-gpu=*) cat "$0.gpus" ;;
esac
"""


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A function that installs a fake nvidia-smi, which prints the given lines."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    program = tmp_path / "nvidia-smi"

    def install(text: str = SMI, **printed: str) -> None:
        program.write_text(text)
        program.chmod(0o755)
        for name, lines in printed.items():
            Path(f"{program}.{name}").write_text(lines)

    return install


def test_gpus_are_read_from_nvidia_smi(smi: Callable[..., None]) -> None:
    smi(
        gpus="0, GPU-a, 580.65.06, NVIDIA H200\n"
        "1, [GPU is lost], 580.65.06, NVIDIA H200\n"
        "2, GPU-c, 580.65.06, NVIDIA A100, 80 GB\n",
    )
    found = machine.gpus()
    assert found["found"] == [
        {"index": 0, "name": "NVIDIA H200", "uuid": "GPU-a"},
        {"index": 2, "name": "NVIDIA A100, 80 GB", "uuid": "GPU-c"},
    ]
    assert (found["driver"], found["visible"]) == ("580.65.06", None)


def test_driver_failure_is_reported(smi: Callable[..., None]) -> None:
    smi("#!/bin/sh\necho 'Failed to initialize NVML: Driver/library version mismatch'; exit 18")
    assert machine.gpus()["error"].endswith("Driver/library version mismatch")
    smi("#!/bin/sh\necho 'No devices were found'; exit 6")
    assert machine.gpus() == {"found": [], "visible": None}
