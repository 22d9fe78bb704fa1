"""Errors of a rank whose GPU is unusable, full or failing, simulated on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from distkit.cluster.processes.rank_spec import Spec
from distkit.cluster.rank import gpu
from distkit.errors import StartError


def spec(folder: Path) -> Spec:
    return Spec(1, 4, str(folder), "rank-1", "nccl", "cuda:0")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Fake torch.cuda for a working GPU; return the arguments of the calls to it."""
    made: dict[str, Any] = {}
    for name in ("init", "set_device", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda *args, name=name: made.update({name: args}))
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    return made


def raising(error: BaseException) -> Callable[..., None]:
    def call(*_: object) -> None:
        raise error

    return call


@pytest.mark.parametrize(
    ("message", "remedy"),
    [
        ("CUDA error: no CUDA-capable device is detected", "it is missing or not visible"),
        ("CUDA error: invalid device ordinal\nCompile with …", "it is missing or not visible"),
        ("CUDA error: device is lost", "it is missing or not visible"),
        ("The NVIDIA driver on your system is too old", "install a newer driver"),
        ("Cannot re-initialize CUDA in forked subprocess.", "sitecustomize"),
        ("CUDA error: initialization error", "sitecustomize"),
        ("Torch not compiled with CUDA enabled", "install torch with CUDA"),
        ("CUDA error: out of memory", "other programs are using its memory"),
        ("CUDA error: CUDA-capable device(s) is/are busy or unavailable", "nvidia-smi -c 0"),
        ("CUDA error: no kernel image is available for execution on the device", "generation"),
        ("something else", "distkit doctor"),
    ],
)
def test_unusable_gpu_raises(
    message: str,
    remedy: str,
    calls: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "set_device", raising(RuntimeError(message)))
    with pytest.raises(StartError) as caught:
        gpu.initialize(spec(tmp_path))
    first = message.partition("\n")[0].rstrip(".")
    assert str(caught.value).startswith(f"rank 1 on cuda:0 cannot use its GPU: {first};")
    assert remedy in str(caught.value)


def test_tensor_on_another_device_is_explained(tmp_path: Path) -> None:
    for message, where in (
        ("No backend type associated with device type cpu", "on cpu"),
        ("Tensors must be CUDA and dense", "on the CPU"),
    ):
        hint = gpu.hint(RuntimeError(message), spec(tmp_path))
        assert "communicates over nccl" in hint and where in hint and 'x.to("cuda:0")' in hint
    ordinal = RuntimeError("CUDA error: invalid device ordinal")  # set_device(LOCAL_RANK)
    assert "cuda:0: use torch.device('cuda')" in gpu.hint(ordinal, spec(tmp_path))
    assert gpu.hint(ValueError("no"), spec(tmp_path)) == ""
