"""Checkpoints that any number of ranks can load: ``torch.distributed.checkpoint``'s format."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from distkit.errors import StrategyError
from distkit.strategies import aggregation, variables
from distkit.strategies.context import check_may_enter
from distkit.strategies.strategy import Strategy


def save(
    strategy: Strategy,
    folder: str | Path,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    **extra: Any,
) -> None:
    """Save a model, its optimizer and more; all ranks call it, each writes what only it has.

    A variable that replicas hold differently is saved as its aggregate.

    Args:
        strategy: in whose scope the model was made.
        folder: gets the files, visible to all ranks.
        model: parameters, sharded ones too, and buffers.
        optimizer: its state, by names of parameters.
        extra: numbers, texts and tensors, for example ``epoch=3``.

    Source:
        PyTorch, ``torch.distributed.checkpoint``.
    """
    check_may_enter(strategy, "save()")
    with _as_torch_does():
        state = _state(model, optimizer)
        state["model"] |= aggregation.aggregated_buffers(strategy, model)
        _dcp().save({**state, "extra": extra}, checkpoint_id=folder, no_dist=_alone())


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
        folder: of the files.
        model: gets the values, in place.
        optimizer: gets its state.
        extra: what to load beside them, with values for what is not there.

    Returns:
        The saved ``extra``.

    Raises:
        StrategyError: there is no checkpoint, or it is of another model.
    """
    check_may_enter(strategy, "load()")
    if not Path(folder, ".metadata").exists():
        raise StrategyError(f"There is no checkpoint in {folder}.")
    from torch.distributed.checkpoint import CheckpointException
    from torch.distributed.checkpoint.state_dict import set_state_dict

    optimizers = [] if optimizer is None else [optimizer]
    with _as_torch_does():
        state = {**_state(model, optimizer), "extra": extra}
        try:
            _dcp().load(state, checkpoint_id=folder, no_dist=_alone())
        except (CheckpointException, RuntimeError, ValueError) as error:
            why = str(error).strip().splitlines()[-1]
            raise StrategyError(f"The checkpoint in {folder} is of another model: {why}") from error
        weights, moments = state["model"], state.get("optimizer", {})
        set_state_dict(model, optimizers, model_state_dict=weights, optim_state_dict=moments)
    return {**extra, **state["extra"]}


def save_weights(strategy: Strategy, path: str | Path, model: nn.Module) -> None:
    """Write a model's weights and buffers to one ``.safetensors`` file; the chief writes it.

    All ranks call it.

    Args:
        strategy: in whose scope the model was made.
        path: the file.
        model: whose parameters each rank holds whole.

    Raises:
        StrategyError: safetensors is not installed.
    """
    tensors = _safetensors()
    state = aggregation.state_dict(strategy, model)
    if strategy._replica == 0:
        tensors.save_file({k: v.detach().contiguous() for k, v in state.items()}, str(path))


def load_weights(path: str | Path, model: nn.Module) -> None:
    """Read a ``.safetensors`` file into a model.

    Args:
        path: the file.
        model: gets the values, in place.

    Raises:
        StrategyError: safetensors is not installed.
        RuntimeError: names or shapes differ, as with ``load_state_dict``.
    """
    model.load_state_dict(_safetensors().load_file(str(path)))


def _state(model: nn.Module, optimizer: Optimizer | None) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    weights, state = get_state_dict(model, [] if optimizer is None else [optimizer])
    return {"model": weights} | ({} if optimizer is None else {"optimizer": state})


def _dcp() -> Any:
    return importlib.import_module("torch.distributed.checkpoint")


def _alone() -> bool:
    return not dist.is_initialized()


@contextmanager
def _as_torch_does() -> Iterator[None]:
    """Without its remarks on parts of its own, and with its steps that change nothing."""
    with warnings.catch_warnings(), variables.unwatched():
        warnings.simplefilter("ignore")
        yield


def _safetensors() -> Any:
    try:
        return importlib.import_module("safetensors.torch")
    except ImportError:
        raise StrategyError(
            "safetensors is not installed. Install it with `pip install safetensors`, or use "
            "dk.strategies.save, which writes torch's own format."
        ) from None
