"""Checkpoints that any number of ranks can load: ``torch.distributed.checkpoint``'s format."""

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
from distkit_strategies.variables import of_all_replicas, owned, state_dict


def save(
    strategy: Strategy,
    folder: str | Path,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    **extra: Any,
) -> None:
    """Save a model, its optimizer and more; all ranks call it, each writes what only it has.

    A variable that replicas hold differently is saved as its aggregate. Parameter servers keep the
    state of their optimizer: it is not saved. Ranks that do not train together, as under the
    default strategy, have a checkpoint each: rank r > 0 saves in the folder ``rank-r`` beside
    ``folder``.

    Args:
        strategy: in whose scope the model was made.
        folder: gets the files, visible to all ranks.
        model: parameters, sharded ones too, and buffers.
        optimizer: its state, by names of parameters.
        extra: numbers, texts and tensors, for example ``epoch=3``.

    Raises:
        StrategyError: on all ranks: one of them could not write.

    Source:
        PyTorch, ``torch.distributed.checkpoint``.
    """
    strategy._check_place("save()")
    values, own = state_dict(strategy, model), strategy._own(optimizer)
    folder = place(strategy, folder)
    with _together(strategy, f"The checkpoint in {folder} was not saved"):
        if strategy._chief or strategy._sharded:
            state = {"model": values, "extra": extra, **_moments(model, own)}
            _dcp().save(state, checkpoint_id=folder, no_dist=not strategy._sharded)


def load(
    strategy: Strategy,
    folder: str | Path,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    **extra: Any,
) -> dict[str, Any]:
    """Load what :func:`save` saved, on any number of ranks, into a model and its optimizer.

    Args:
        strategy: in whose scope the model was made.
        folder: of the files; a rank that has saved alone gets its own.
        model: gets the values, in place.
        optimizer: gets its state.
        extra: what to load beside them, with values for what is not there.

    Returns:
        The saved ``extra``.

    Raises:
        StrategyError: on all ranks: there is no checkpoint, or it is of another model.
    """
    strategy._check_place("load()")
    own, mine = strategy._own(optimizer), place(strategy, folder)
    folder = mine if mine.exists() else Path(folder)
    with _together(strategy, f"The checkpoint in {folder} was not loaded"):
        _check(folder, model, own)
        state = {"model": model.state_dict(), "extra": extra, **_moments(model, own)}
        _dcp().load(state, checkpoint_id=folder, no_dist=True)
        model.load_state_dict(of_all_replicas(model, state["model"]))
        if own is not None:
            _names().set_optimizer_state_dict(model, own, state["optimizer"])
    strategy._loaded(optimizer)
    return {**extra, **state["extra"]}


def _check(folder: Path, model: nn.Module, optimizer: Optimizer | None) -> None:
    """Compare what is saved with what is loaded: each rank reads the same, and decides alike.

    Raises:
        StrategyError: names or shapes differ, or there is no state for the optimizer.
    """
    if not (folder / ".metadata").exists():
        raise StrategyError(f"There is no checkpoint in {folder}.")
    saved = _dcp().FileSystemReader(folder).read_metadata().state_dict_metadata
    there: dict[str, Any] = {n: tuple(m.size) for n, m in saved.items() if hasattr(m, "size")}
    here = {
        f"model.{n}": tuple(t.shape) for n, t in model.state_dict().items() if hasattr(t, "shape")
    }
    for name in {**here, **there}:
        shapes = there.get(name, "missing"), here.get(name, "missing")
        if name.startswith("model.") and shapes[0] != shapes[1]:
            raise StrategyError(
                f"The checkpoint in {folder} is of another model: {name.removeprefix('model.')} "
                f"is {shapes[0]} there and {shapes[1]} here. Load it into a model "
                "like the saved one."
            )
    if optimizer is not None and not any(name.startswith("optimizer.") for name in saved):
        raise StrategyError(
            f"The checkpoint in {folder} has no optimizer state: it was saved without an "
            "optimizer, or by parameter servers, which keep it. Load the model alone."
        )


def save_weights(strategy: Strategy, path: str | Path, model: nn.Module) -> None:
    """Write a model's weights and buffers to one ``.safetensors`` file; the chief writes it.

    All ranks call it; ranks that do not train together have a file each, as with :func:`save`. A
    tensor with two names is written twice, for programs that know nothing of that.

    Args:
        strategy: in whose scope the model was made.
        path: the file.
        model: also one whose parameters are sharded.

    Raises:
        StrategyError: on all ranks: safetensors is not installed, or the chief could not write.
    """
    tensors, path = _safetensors(), place(strategy, path)
    state = state_dict(strategy, model)
    whole = {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in state.items()}
    with _together(strategy, f"{path} was not written"):
        if strategy._chief:
            path.parent.mkdir(exist_ok=True)
            plain = {
                name: value.detach().clone() for name, value in whole.items()
            }  # also tied ones
            tensors.save_file(plain, str(path), metadata={"format": "pt"})


def load_weights(path: str | Path, model: nn.Module) -> None:
    """Read a ``.safetensors`` file into a model; all ranks call it.

    Args:
        path: the file.
        model: gets the values, in place.

    Raises:
        StrategyError: safetensors is not installed.
        RuntimeError: names or shapes differ, as with ``load_state_dict``.
    """
    tensors, found = _safetensors(), owned(next(chain(model.parameters(), model.buffers())))
    mine = Path(path) if found is None else place(found[0], path)
    saved = tensors.load_file(str(mine if mine.exists() else path))
    full = _names().StateDictOptions(full_state_dict=True)
    _names().set_model_state_dict(model, of_all_replicas(model, saved), options=full)
    if found is not None:
        found[0]._loaded(None)


def place(strategy: Strategy, path: str | Path) -> Path:
    """Where this process saves: ranks that do not save together must not write the same files.

    Args:
        strategy: of the model.
        path: what the program says. It is rank 0's; rank r has ``rank-r/`` before the name.

    >>> place(Strategy(), "run/epoch-3").as_posix()
    'run/epoch-3'
    """
    path, rank = Path(path), int(os.environ.get("RANK", 0))
    return path.parent / f"rank-{rank}" / path.name if strategy._steps_alone and rank else path


@contextmanager
def _together(strategy: Strategy, failed: str) -> Iterator[None]:
    """Leave it together: what one replica could not do is an error of all.

    Raises:
        StrategyError: a replica has raised.
    """
    error: Exception | None = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's remarks on parts of its own
        try:
            yield
        except _dcp().CheckpointException as raised:  # on all ranks: whose error is it?
            error = raised.failures.get(strategy._replica * strategy._sharded, [None])[0]
        except Exception as raised:
            error = raised
    failures = strategy._failures(error)
    if isinstance(error, StrategyError):
        raise error
    if failures:
        raise StrategyError(f"{failed}: {'; '.join(failures)}") from error


def _moments(model: nn.Module, optimizer: Optimizer | None) -> dict[str, Any]:
    """The state of an optimizer, if there is one, by names of parameters."""
    if optimizer is None:
        return {}
    return {"optimizer": _names().get_optimizer_state_dict(model, optimizer)}


def _dcp() -> Any:
    return importlib.import_module("torch.distributed.checkpoint")


def _names() -> Any:
    return importlib.import_module("torch.distributed.checkpoint.state_dict")


def _safetensors() -> Any:
    try:
        return importlib.import_module("safetensors.torch")
    except ImportError:
        raise StrategyError(
            "safetensors is not installed. Install it with `pip install safetensors`, or use "
            "dk.strategies.save, which writes torch's own format."
        ) from None
