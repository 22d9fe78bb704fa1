"""Optimizer states in a file: what each key has beside its value. Nothing in it is executed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor

from distkit.errors import KVStoreError
from distkit.kvstore.protocol.messages import Key
from distkit.kvstore.protocol.placement import DTYPES

#: The flat tensors of each key, by slot.
States = dict[tuple["Key", str], "Tensor"]


def write(path: str | Path, states: States, optimizer: tuple[str, dict[str, Any]] | None) -> None:
    """Save states, and the optimizer's name and options if they are given."""
    index = [[key, slot, str(t.dtype).removeprefix("torch.")] for (key, slot), t in states.items()]
    arrays: dict[str, Any] = {
        str(i): t.contiguous().reshape(-1).view(torch.uint8).numpy()
        for i, t in enumerate(states.values())
    }
    told = json.dumps({"states": index, "optimizer": optimizer})
    with Path(path).open("wb") as file:
        np.savez(file, index=np.array(told), **arrays)


def read(path: str | Path) -> tuple[States, tuple[str, dict[str, Any]] | None]:
    """Read what :func:`write` has saved.

    Raises:
        KVStoreError: the file is not there, or not such a file.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            index = json.loads(str(file["index"]))
            states = {
                (key, slot): _tensor(file[str(i)], DTYPES[dtype])
                for i, (key, slot, dtype) in enumerate(index["states"])
            }
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, BadZipFile) as e:
        raise KVStoreError(
            f"{path} has no optimizer states ({type(e).__name__}: {e}). "
            "Give a file that kv.save_optimizer_states has written."
        ) from None
    optimizer = index["optimizer"]
    return states, None if optimizer is None else (optimizer[0], optimizer[1])


def _tensor(data: Any, dtype: torch.dtype) -> Tensor:
    """Bytes as a flat tensor; torch views no empty one as another dtype."""
    found = torch.from_numpy(data.copy())
    return found.view(dtype) if len(found) else torch.empty(0, dtype=dtype)
