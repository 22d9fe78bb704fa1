"""Checkpoints for any number of ranks, in the format of ``torch.distributed.checkpoint``."""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from distkit.errors import StrategyError
from distkit_strategies.strategy import Strategy
from distkit_strategies.variables import as_global_state, owner_of, state_dict


def save(
    strategy: Strategy,
    folder: str | Path,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    **extra: Any,
) -> None:
    """Save a model, its optimizer and other values. Call it on all ranks.

    If parameters are sharded, each rank writes its shards; otherwise the chief writes everything.
    A variable whose copies differ is saved as their aggregate. The optimizer state of parameter
    servers is not saved. Ranks that train independently, as under the default strategy, save
    separate checkpoints: rank 1 saves ``run/rank-1/last`` in place of ``run/last``.

    Args:
        strategy: the strategy of the model.
        folder: the folder for the checkpoint's files, visible to all ranks.
        model: the model. Its parameters, sharded or not, and its buffers are saved.
        optimizer: the optimizer. Its state is saved under the names of the parameters.
        extra: numbers, strings and tensors, for example ``epoch=3``.

    Raises:
        StrategyError: a rank could not write; raised on all ranks.

    Source:
        PyTorch, ``torch.distributed.checkpoint``.
    """
    strategy._check_context("save()")
    values, local = state_dict(strategy, model), strategy._local_optimizer(optimizer)
    folder = rank_path(strategy, folder)
    with _raise_on_all(strategy, f"The checkpoint in {folder} was not saved"):
        if strategy._chief or strategy._sharded:
            state = {"model": values, "extra": extra, **_optimizer_state(model, local)}
            _dcp().save(state, checkpoint_id=folder, no_dist=not strategy._sharded)


def load(
    strategy: Strategy,
    folder: str | Path,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    **extra: Any,
) -> dict[str, Any]:
    """Load a checkpoint written by :func:`save`, on any number of ranks.

    Args:
        strategy: the strategy of the model.
        folder: the folder with the checkpoint's files. Ranks that train independently load their
            own checkpoints if these exist.
        model: the model, loaded in place.
        optimizer: the optimizer, loaded in place.
        extra: defaults for additional values, by name.

    Returns:
        The saved values of ``extra``.

    Raises:
        StrategyError: the checkpoint is missing, is from a different model, or has no state for
            the optimizer; raised on all ranks.
    """
    strategy._check_context("load()")
    local, own_folder = strategy._local_optimizer(optimizer), rank_path(strategy, folder)
    folder = own_folder if own_folder.exists() else Path(folder)
    with _raise_on_all(strategy, f"The checkpoint in {folder} was not loaded"):
        _check(folder, model, local)
        state = {"model": model.state_dict(), "extra": extra, **_optimizer_state(model, local)}
        _dcp().load(state, checkpoint_id=folder, no_dist=True)
        model.load_state_dict(as_global_state(model, state["model"]))
        if local is not None:
            _state_dict_module().set_optimizer_state_dict(model, local, state["optimizer"])
    strategy._after_load(optimizer)
    return {**extra, **state["extra"]}


def _check(folder: Path, model: nn.Module, optimizer: Optimizer | None) -> None:
    """Compare a checkpoint with the model; the result is the same on all ranks.

    Raises:
        StrategyError: the checkpoint is missing, names or shapes differ, or the checkpoint has no
            state for the optimizer.
    """
    if not (folder / ".metadata").exists():
        raise StrategyError(f"There is no checkpoint in {folder}. Check the path.")
    saved = _dcp().FileSystemReader(folder).read_metadata().state_dict_metadata
    in_checkpoint: dict[str, Any] = {
        n: tuple(m.size) for n, m in saved.items() if hasattr(m, "size")
    }
    in_model = {
        f"model.{n}": tuple(t.shape) for n, t in model.state_dict().items() if hasattr(t, "shape")
    }
    for name in {**in_model, **in_checkpoint}:
        shapes = in_checkpoint.get(name, "missing"), in_model.get(name, "missing")
        if name.startswith("model.") and shapes[0] != shapes[1]:
            raise StrategyError(
                f"The checkpoint in {folder} belongs to a different model: "
                f"{name.removeprefix('model.')} is {shapes[0]} in the checkpoint and {shapes[1]} "
                "in the model. Load it into a model with the same layers."
            )
    if optimizer is not None and not any(name.startswith("optimizer.") for name in saved):
        raise StrategyError(
            f"The checkpoint in {folder} has no optimizer state: it was saved without an "
            "optimizer, or with parameter servers, which keep that state. Load only the model."
        )


def save_weights(strategy: Strategy, path: str | Path, model: nn.Module) -> None:
    """Write a model's weights and buffers to one ``.safetensors`` file. Call it on all ranks.

    The chief writes the file. Ranks that train independently write separate files, as in
    :func:`save`. A tensor with two names is written twice, so that programs without tied weights
    can load it.

    Args:
        strategy: the strategy of the model.
        path: the path of the file to write.
        model: the model; its parameters may be sharded.

    Raises:
        StrategyError: safetensors is not installed, or the chief could not write; raised on all
            ranks.
    """
    safetensors, path = _safetensors(), rank_path(strategy, path)
    state = state_dict(strategy, model)
    gathered = {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in state.items()}
    with _raise_on_all(strategy, f"{path} was not written"):
        if strategy._chief:
            path.parent.mkdir(exist_ok=True)
            # clone tied weights too, so that no tensors share memory
            copies = {name: value.detach().clone() for name, value in gathered.items()}
            safetensors.save_file(copies, str(path), metadata={"format": "pt"})


def load_weights(path: str | Path, model: nn.Module) -> None:
    """Load a model's weights and buffers from a ``.safetensors`` file. Call it on all ranks.

    Args:
        path: the path of the file to read. Ranks that train independently read their own files if
            these exist.
        model: the model, loaded in place.

    Raises:
        StrategyError: safetensors is not installed.
        RuntimeError: names or shapes differ, as with ``load_state_dict``.
    """
    strategy, _ = owner_of(next(chain(model.parameters(), model.buffers()))) or (None, "")
    own_path = Path(path) if strategy is None else rank_path(strategy, path)
    saved = _safetensors().load_file(str(own_path if own_path.exists() else path))
    full = _state_dict_module().StateDictOptions(full_state_dict=True)
    _state_dict_module().set_model_state_dict(model, as_global_state(model, saved), options=full)
    if strategy is not None:
        strategy._after_load(None)


def rank_path(strategy: Strategy, path: str | Path) -> Path:
    """Return the path that this process uses.

    If ranks train independently, rank r > 0 inserts ``rank-r/`` before the name, so that ranks do
    not overwrite each other's files. Otherwise all ranks use ``path``.

    >>> rank_path(Strategy(), "run/epoch-3").as_posix()
    'run/epoch-3'
    """
    path, rank = Path(path), int(os.environ.get("RANK", 0))
    return (
        path.parent / f"rank-{rank}" / path.name if strategy._steps_outside_run and rank else path
    )


@contextmanager
def _raise_on_all(strategy: Strategy, failed: str) -> Iterator[None]:
    """Raise StrategyError on all replicas if one of them raises in the context."""
    error: Exception | None = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's warnings about its internals
        try:
            yield
        except _dcp().CheckpointException as raised:  # raised on all ranks, with all errors
            error = raised.failures.get(strategy._replica * strategy._sharded, [None])[0]
        except Exception as raised:
            error = raised
    failures = strategy._failures(error)
    if isinstance(error, StrategyError):
        raise error
    if failures:
        raise StrategyError(f"{failed}: {'; '.join(failures)}") from error


def _optimizer_state(model: nn.Module, optimizer: Optimizer | None) -> dict[str, Any]:
    """Return the state of an optimizer, if there is one, under the names of the parameters."""
    if optimizer is None:
        return {}
    return {"optimizer": _state_dict_module().get_optimizer_state_dict(model, optimizer)}


def _dcp() -> Any:
    return importlib.import_module("torch.distributed.checkpoint")


def _state_dict_module() -> Any:
    return importlib.import_module("torch.distributed.checkpoint.state_dict")


def _safetensors() -> Any:
    try:
        return importlib.import_module("safetensors.torch")
    except ImportError:
        raise StrategyError(
            "safetensors is not installed. Install it with `pip install safetensors`, or use "
            "dk.strategies.save, which writes torch's own format."
        ) from None
