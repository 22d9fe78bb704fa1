"""Assignment of devices and backends to ranks, and the notes about it, without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
from gpus import some_gpus

from distkit.cluster.plan import Gpus, Plan, assign_devices, examine, make_plan
from distkit.errors import StartError
from distkit_hosts.remote.planning import combine


def assign(ranks: int, gpus: Gpus, **requested: Any) -> tuple[list[str], str, str]:
    """Return the devices, the backend and the note."""
    devices, backend, note = assign_devices(ranks, gpus, **requested)
    return list(devices), backend, note


@pytest.mark.parametrize(
    ("ranks", "gpus", "devices", "backend", "expected"),
    [
        (4, some_gpus(0), ["cpu"] * 4, "gloo", ["gloo on CPU"]),
        (1, some_gpus(1), ["cuda:0"], "nccl", ["every rank has its own GPU"]),
        (2, some_gpus(2), ["cuda:0", "cuda:1"], "nccl", ["every rank has its own GPU"]),
        (2, some_gpus(8), ["cuda:0", "cuda:1"], "nccl", ["every rank has its own GPU"]),
        (
            4,
            some_gpus(1),
            ["cuda:0"] * 4,
            "gloo",
            ["ranks 0, 1, 2 and 3 share cuda:0, and NCCL needs one", "through host memory"],
        ),
        (
            3,
            some_gpus(2),
            ["cuda:0", "cuda:1", "cuda:0"],
            "gloo",
            ["ranks 0 and 2 share cuda:0", "through host memory"],
        ),
        (2, some_gpus(2, ()), ["cuda:0", "cuda:1"], "gloo", ["torch is built without NCCL"]),
    ],
)
def test_ranks_are_assigned_round_robin(
    ranks: int, gpus: Gpus, devices: list[str], backend: str, expected: list[str]
) -> None:
    found, chosen, note = assign(ranks, gpus)
    assert (found, chosen) == (devices, backend)
    assert all(text in note for text in expected), note


@pytest.mark.parametrize(
    ("ranks", "gpus", "requested", "backend", "expected"),
    [
        (2, some_gpus(2), {"device": "cpu"}, "gloo", "gloo on CPU"),
        (2, some_gpus(2), {"backend": "gloo"}, "gloo", "as requested"),
        (2, some_gpus(2), {"device": "cuda:1"}, "gloo", "ranks 0 and 1 share cuda:1"),
    ],
)
def test_request_determines_the_backend_and_the_note(
    ranks: int, gpus: Gpus, requested: dict[str, str], backend: str, expected: str
) -> None:
    _, chosen, note = assign(ranks, gpus, **requested)
    assert chosen == backend and expected in note, note


@pytest.mark.parametrize(
    ("ranks", "gpus", "requested", "expected"),
    [
        (2, some_gpus(0), {"device": "cuda"}, "nvidia-smi lists no GPU here"),
        (2, some_gpus(2), {"device": "cuda:2"}, "has cuda:0 and cuda:1. Use"),
        (2, some_gpus(1), {"device": "cuda:1"}, "has cuda:0."),
        (2, some_gpus(2), {"device": "cuda:"}, "device='cuda:' is invalid"),
        (2, some_gpus(2), {"device": "gpu"}, "device='gpu' is invalid"),
        (2, some_gpus(2), {"backend": "mpi"}, "backend='mpi' is invalid"),
        (4, some_gpus(2), {"backend": "nccl"}, "or fewer ranks"),
        (2, some_gpus(0), {"backend": "nccl"}, "one GPU for each of 2 ranks; none is usable"),
    ],
)
def test_unavailable_device_raises(
    ranks: int, gpus: Gpus, requested: dict[str, Any], expected: str
) -> None:
    with pytest.raises(StartError) as caught:
        assign(ranks, gpus, **requested)
    assert expected in str(caught.value), caught.value


FOUND: dict[str, Any] = {
    "found": [
        {"index": i, "name": "H100", "uuid": f"GPU-{uuid}"}
        for i, uuid in enumerate(["aa", "ab", "bb"])
    ],
    "driver": "580.65.06",
}
TORCH = {"cuda": "13.0", "nccl": [2, 29, 7]}


@pytest.mark.parametrize(
    ("visible", "indices"),
    [
        (None, [0, 1, 2]),
        ("2,0", [2, 0]),
        (" 1 ,", [1]),
        ("GPU-ab,GPU-aa", [1, 0]),
    ],
)
def test_cuda_visible_devices_is_respected(visible: str | None, indices: list[int]) -> None:
    gpus = examine({**FOUND, "visible": visible}, TORCH)
    assert [gpu.index for gpu in gpus.usable] == indices
    assert (gpus.nccl, gpus.obstacle) == ((2, 29, 7), None)


@pytest.mark.parametrize(
    ("found", "torch", "kind", "expected"),
    [
        ({"visible": ""}, {}, "hidden", "CUDA_VISIBLE_DEVICES='' selects none of the GPUs here"),
        ({"visible": "7"}, {}, "hidden", "GPU 0, GPU 1 and GPU 2. Unset it"),
        ({"visible": "MIG-x"}, {}, "hidden", "selects none"),
        ({}, {"cuda": None}, "torch", "torch is built without CUDA. Install torch with CUDA"),
        ({"found": [], "error": "Driver not loaded"}, {}, "driver", "Driver not loaded. Reboot"),
    ],
)
def test_obstacles_are_reported(
    found: dict[str, Any], torch: dict[str, Any], kind: str, expected: str
) -> None:
    gpus = examine({**FOUND, **found}, {**TORCH, **torch})
    assert gpus.obstacle is not None and gpus.obstacle.kind == kind
    assert expected in str(gpus.obstacle)
    assert assign(2, gpus)[1:] == ("gloo", f"gloo on CPU: {gpus.obstacle}")
    with pytest.raises(StartError) as caught:
        assign(2, gpus, device="cuda")
    assert expected in str(caught.value)


def test_each_machine_assigns_its_ranks() -> None:
    def plan(alpha: int, beta: int) -> Plan:
        resources = {"cpus": 8, "memory": 10**12}
        gpus = {"alpha": some_gpus(alpha), "beta": some_gpus(beta)}
        return combine(
            {n: make_plan(2, 0, "auto", "auto", gpus=g, **resources) for n, g in gpus.items()}
        )

    exclusive = plan(2, 4)
    assert (exclusive.backend, exclusive.devices) == ("nccl", ("cuda:0", "cuda:1") * 2)
    mixed = plan(2, 1)
    assert (mixed.backend, mixed.devices[2:]) == ("gloo", ("cuda:0", "cuda:0"))
    assert "alpha: cuda:0, cuda:1 · beta: cuda:0, gloo: ranks 0 and 1 share cuda:0" in mixed.note
    assert plan(0, 0).note == "2 on alpha, 2 on beta · gloo"
