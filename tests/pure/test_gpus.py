"""Assignment of devices and backends, and its messages, without a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from gpus import GIB, some_gpus

from distkit.cluster.gpus import DeviceAssignment, Gpus, assign_devices, examine
from distkit.cluster.plan import Machine, make_plan, plan_for_machines
from distkit.errors import StartError


def assigned(ranks: int, gpus: Gpus, **wanted: Any) -> tuple[list[str], str, str]:
    """Return devices, backend and note."""
    assignments, backend, note = assign_devices(ranks, gpus, **wanted)
    assert len(assignments) == ranks
    return [assignment.device for assignment in assignments], backend, note


@pytest.mark.parametrize(
    ("ranks", "gpus", "devices", "backend", "said"),
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
            ["ranks 0, 1, 2 and 3 share GPU 0, and NCCL needs one", "through host memory"],
        ),
        (
            3,
            some_gpus(2),
            ["cuda:0", "cuda:1", "cuda:0"],
            "gloo",
            ["ranks 0 and 2 share GPU 0", "through host memory"],
        ),
        (2, some_gpus(2, ()), ["cuda:0", "cuda:1"], "gloo", ["torch is built without NCCL"]),
    ],
)
def test_ranks_are_assigned_round_robin(
    ranks: int, gpus: Gpus, devices: list[str], backend: str, said: list[str]
) -> None:
    found, chosen, note = assigned(ranks, gpus)
    assert (found, chosen) == (devices, backend)
    assert all(words in note for words in said), note


@pytest.mark.parametrize(
    ("ranks", "gpus", "wanted", "backend", "said"),
    [
        (2, some_gpus(2), {"device": "cpu"}, "gloo", "gloo on CPU"),
        (2, some_gpus(2), {"backend": "gloo"}, "gloo", "as requested"),
        (2, some_gpus(2), {"device": "cuda:1"}, "gloo", "ranks 0 and 1 share GPU 1"),
    ],
)
def test_requested_device_is_used(
    ranks: int, gpus: Gpus, wanted: dict[str, str], backend: str, said: str
) -> None:
    _, chosen, note = assigned(ranks, gpus, **wanted)
    assert chosen == backend and said in note, note


@pytest.mark.parametrize(
    ("ranks", "gpus", "wanted", "said"),
    [
        (2, some_gpus(0), {"device": "cuda"}, "torch sees no GPU here"),
        (2, some_gpus(2), {"device": "cuda:2"}, "2 GPUs, cuda:0 to cuda:1"),
        (2, some_gpus(1), {"device": "cuda:1"}, "has 1 GPU, cuda:0."),
        (2, some_gpus(2), {"device": "cuda:"}, "device='cuda:' is invalid"),
        (2, some_gpus(2), {"device": "gpu"}, "device='gpu' is invalid"),
        (2, some_gpus(2), {"backend": "mpi"}, "backend='mpi' is invalid"),
        (2, some_gpus(2), {"memory_fraction": 1.5}, "memory_fraction=1.5"),
        (4, some_gpus(2), {"backend": "nccl"}, "at most 2 ranks"),
        (2, some_gpus(0), {"backend": "nccl"}, "one GPU for each of 2 ranks; none is usable"),
        (2, some_gpus(1, free=GIB), {"device": "cuda"}, "GPU 0 has 1 GiB of 80 GiB free"),
    ],
)
def test_unavailable_device_raises(
    ranks: int, gpus: Gpus, wanted: dict[str, Any], said: str
) -> None:
    with pytest.raises(StartError) as refused:
        assigned(ranks, gpus, **wanted)
    assert said in str(refused.value), refused.value


def test_full_gpu_is_skipped() -> None:
    two = some_gpus(2)
    gpus = replace(two, usable=(replace(two.usable[0], free=0), two.usable[1]))
    assert assigned(2, gpus, device="cuda")[0] == ["cuda:1", "cuda:1"]
    devices, backend, note = assigned(2, some_gpus(1, free=GIB))
    assert (devices, backend) == (["cpu", "cpu"], "gloo")
    assert "gloo on CPU: GPU 0 has 1 GiB of 80 GiB free" in note and "1 fit" in note
    plan = make_plan(2, 0, "auto", "auto", cpus=8, memory=10**12, gpus=some_gpus(1, free=GIB))
    assert plan.oversubscription_warning == note  # also warned about, if no card is displayed
    assert (
        make_plan(
            2, 0, "cpu", "auto", cpus=8, memory=10**12, gpus=some_gpus(1)
        ).oversubscription_warning
        == ""
    )


def test_memory_is_divided_among_ranks() -> None:
    def assignments(**given: Any) -> list[DeviceAssignment]:
        fraction = given.pop("memory_fraction", None)
        return list(assign_devices(4, some_gpus(1, **given), memory_fraction=fraction)[0])

    shares = [assignment.fraction for assignment in assignments()]
    assert len(set(shares)) == 1 and 0.24 < shares[0] < 0.25  # with memory for CUDA's contexts
    assert {assignment.fraction for assignment in assignments(total=0, free=0)} == {0.25}  # unknown
    assert 0.1 < assignments(free=40 * GIB)[0].fraction < 0.125  # others use half of it
    assert {assignment.fraction for assignment in assignments(memory_fraction=0.1)} == {0.1}
    assert assignments(memory_fraction=0.1)[0].summary == "cuda:0, at most 8 GiB"
    assert [assignment.fraction for assignment in assign_devices(2, some_gpus(2))[0]] == [0.0, 0.0]


def test_rank_environment_names_its_device() -> None:
    (one, _), backend, _ = assign_devices(2, some_gpus(2))
    assert one.environ(backend) == {"NCCL_SOCKET_IFNAME": "=lo"}
    assert one.environ("gloo") == DeviceAssignment().environ("gloo") == {}


FOUND: dict[str, Any] = {
    "found": [
        {"index": i, "name": "H100", "uuid": f"GPU-{uuid}", "total": 80 * GIB, "free": 70 * GIB}
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
        ("GPU-b", [2]),
        ("GPU-ab,GPU-aa", [1, 0]),
        ("1,7,0", [1]),  # entries after an invalid one are ignored
        ("1,-1,0", [1]),
    ],
)
def test_cuda_visible_devices_is_followed(visible: str | None, indices: list[int]) -> None:
    gpus = examine({**FOUND, "visible": visible}, TORCH)
    assert [gpu.index for gpu in gpus.usable] == indices
    assert (gpus.nccl, gpus.obstacle) == ((2, 29, 7), None)
    assignments, _, _ = assign_devices(1, gpus)
    assert (assignments[0].device, assignments[0].gpu) == ("cuda:0", gpus.usable[0])


def test_ranks_share_the_slice_that_cuda_shows() -> None:
    part = {"index": 1, "name": "H100", "uuid": "GPU-cc", "mig": True}
    for visible in (None, "MIG-x"):
        gpus = examine({"found": [FOUND["found"][0], part], "visible": visible}, TORCH)
        assignments, backend, note = assign_devices(2, gpus)
        assert [assignment.device for assignment in assignments] == ["cuda:0", "cuda:0"]
        assert [assignment.fraction for assignment in assignments] == [0.5, 0.5]
        assert backend == "gloo" and "ranks 0 and 1 share a slice of GPU 1" in note
        assert assign_devices(1, gpus)[1] == "nccl"


LOST = {"index": 0, "error": "GPU is lost"}


@pytest.mark.parametrize(
    ("found", "torch", "kind", "said"),
    [
        ({"visible": ""}, {}, "hidden", "CUDA_VISIBLE_DEVICES='' selects none of the GPUs here"),
        ({"visible": "7"}, {}, "hidden", "GPU 0, GPU 1 and GPU 2. Unset it"),
        ({"visible": "GPU-a"}, {}, "hidden", "selects none"),  # of two
        ({"visible": "MIG-x"}, {}, "hidden", "selects none"),
        ({}, {"cuda": None}, "torch", "torch is built without CUDA. Install torch with CUDA"),
        (
            {"driver": "550.1"},
            {},
            "old",
            "550.1 is too old for CUDA 13.0, for which torch",
        ),
        ({"found": [LOST]}, {}, "driver", "GPU 0: GPU is lost"),
        ({"found": [], "error": "Driver not loaded"}, {}, "driver", "Driver not loaded. Reboot"),
    ],
)
def test_obstacles_are_reported(
    found: dict[str, Any], torch: dict[str, Any], kind: str, said: str
) -> None:
    gpus = examine({**FOUND, **found}, {**TORCH, **torch})
    assert gpus.obstacle is not None and gpus.obstacle.kind == kind
    assert said in str(gpus.obstacle)
    assert assigned(2, gpus)[1:] == ("gloo", f"gloo on CPU: {gpus.obstacle}")
    with pytest.raises(StartError) as refused:
        assigned(2, gpus, device="cuda")
    assert said in str(refused.value)


def test_lost_gpu_does_not_hide_the_others() -> None:
    gpus = examine({**FOUND, "found": [*FOUND["found"][1:], LOST]}, TORCH)
    assert [gpu.index for gpu in gpus.usable] == [1, 2]
    assert examine({"found": [], "visible": ""}, {}) == Gpus()  # a machine without GPUs


def test_each_machine_assigns_its_ranks() -> None:
    def plan(*gpus: int, **wanted: Any) -> Any:
        machines = [
            Machine(name, 2, 8, 10**12, some_gpus(n))
            for name, n in zip(("alpha", "beta"), gpus, strict=True)
        ]
        return plan_for_machines(machines, 0, **{"device": "auto", "backend": "auto"} | wanted)

    every = plan(2, 4, threads=None)
    assert (every.backend, every.devices) == ("nccl", ("cuda:0", "cuda:1") * 2)
    mixed = plan(2, 1, threads=None)
    assert (mixed.backend, mixed.devices[2:]) == ("gloo", ("cuda:0", "cuda:0"))
    assert "alpha: cuda:0, cuda:1 · beta: cuda:0, gloo: ranks 0 and 1 share GPU 0" in mixed.note
    assert plan(0, 0, threads=None).note == "2 on alpha, 2 on beta · gloo"
    with pytest.raises(StartError, match="on beta: device='cuda' was requested"):
        plan(2, 0, threads=None, device="cuda")
