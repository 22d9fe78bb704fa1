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

from torch import Tensor, nn
from torch.optim import Optimizer

from distkit.errors import StrategyError
from distkit_strategies import aggregation, variables
from distkit_strategies.context import check_may_enter
from distkit_strategies.strategy import Strategy

#: The file of a checkpoint that has the optimizer's state of parameter servers.
STATES = "servers.npz"


def save(
    strategy: Strategy,
    folder: str | Path,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    **extra: Any,
) -> None:
    """Save a model, its optimizer and more; all ranks call it, each writes what only it has.

    A variable that replicas hold differently is saved as its aggregate. Ranks that do not train
    together, as under the default strategy, have a checkpoint each: rank r > 0 saves in the folder
    ``rank-r`` beside ``folder``.

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
    check_may_enter(strategy, "save()")
    buffers, here = aggregation.aggregated_buffers(strategy, model), strategy._state_here(optimizer)
    folder = place(strategy, folder)
    with _settled(strategy, f"The checkpoint in {folder} was not saved"):
        if strategy._chief or not strategy._chief_saves:
            with _as_torch_does():
                state = {**_state(model, here), "extra": extra}
                state["model"] |= {k: b for k, b in buffers.items() if k in state["model"]}
                _dcp().save(state, checkpoint_id=folder, no_dist=_alone(strategy))
        strategy._saved(folder, optimizer)


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
    check_may_enter(strategy, "load()")
    here, own = strategy._state_here(optimizer), place(strategy, folder)
    folder = own if own.exists() else Path(folder)
    with _settled(strategy, f"The checkpoint in {folder} cannot be read"):
        _check(folder, model, optimizer, here)
    from torch.distributed.checkpoint import CheckpointException
    from torch.distributed.checkpoint.state_dict import set_state_dict

    optimizers = [] if here is None else [here]
    with _as_torch_does():
        state = {**_state(model, here), "extra": extra}
        try:
            _dcp().load(state, checkpoint_id=folder, no_dist=_alone(strategy))
        except (CheckpointException, RuntimeError, ValueError) as error:
            why = str(error).strip().splitlines()[-1]
            raise StrategyError(f"The checkpoint in {folder} is of another model: {why}") from error
        weights, moments = state["model"], state.get("optimizer", {})
        set_state_dict(model, optimizers, model_state_dict=weights, optim_state_dict=moments)
    aggregation.divide_sums(model)
    strategy._loaded(folder, optimizer)
    return {**extra, **state["extra"]}


def _check(
    folder: Path, model: nn.Module, optimizer: Optimizer | None, here: Optimizer | None
) -> None:
    """Compare what is saved with what is to be loaded: each rank reads the same, and decides alike.

    Raises:
        StrategyError: names or shapes differ, or there is no such state.
    """
    if not (folder / ".metadata").exists():
        raise StrategyError(f"There is no checkpoint in {folder}.")
    saved = _dcp().FileSystemReader(folder).read_metadata().state_dict_metadata
    there: dict[str, Any] = {
        n: m.size for n, m in saved.items() if n.startswith("model.") and hasattr(m, "size")
    }
    mine: dict[str, Any] = {
        f"model.{n}": t.shape for n, t in model.state_dict().items() if isinstance(t, Tensor)
    }
    for name in {**mine, **there}:
        if name not in there or name not in mine or tuple(there[name]) != tuple(mine[name]):
            shapes = [tuple(d[name]) if name in d else "missing" for d in (there, mine)]
            raise StrategyError(
                f"The checkpoint in {folder} is of another model: {name.removeprefix('model.')} "
                f"is {shapes[0]} there and {shapes[1]} here. Load it into a model like the saved."
            )
    on_servers = optimizer is not None and here is None
    by_torch = any(n.startswith("optimizer.") for n in saved)
    if optimizer is not None and not ((folder / STATES).exists() if on_servers else by_torch):
        raise StrategyError(
            f"The checkpoint in {folder} has no optimizer state for this strategy: it was saved "
            "without an optimizer, or by servers. Load the model alone."
        )


def save_weights(strategy: Strategy, path: str | Path, model: nn.Module) -> None:
    """Write a model's weights and buffers to one ``.safetensors`` file; the chief writes it.

    All ranks call it; ranks that do not train together have a file each, as with :func:`save`. A
    tensor with two names is written once, and has both when it is loaded.

    Args:
        strategy: in whose scope the model was made.
        path: the file.
        model: also one whose parameters are sharded.

    Raises:
        StrategyError: on all ranks: safetensors is not installed, or the chief could not write.
    """
    tensors, path = _safetensors(), place(strategy, path)
    state, aliases = aggregation.state_dict(strategy, model), _aliases(model)
    state = {k: v for k, v in state.items() if k not in aliases}
    state = {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in state.items()}
    with _settled(strategy, f"{path} was not written"):
        if strategy._chief:
            path.parent.mkdir(exist_ok=True)
            plain = {k: v.detach().contiguous() for k, v in state.items()}
            tensors.save_file(plain, str(path), metadata={"format": "pt", **aliases})


def load_weights(path: str | Path, model: nn.Module) -> None:
    """Read a ``.safetensors`` file into a model; all ranks call it.

    Args:
        path: the file.
        model: gets the values, in place.

    Raises:
        StrategyError: safetensors is not installed.
        RuntimeError: names or shapes differ, as with ``load_state_dict``.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    tensors, first = _safetensors(), next(chain(model.parameters(), model.buffers()))
    found = variables.owned(first)
    own = Path(path) if found is None else place(found[0], path)
    path = own if own.exists() else Path(path)
    saved = tensors.load_file(str(path))
    with tensors.safe_open(str(path), "pt") as file:
        aliases = (file.metadata() or {}).items()
    saved |= {alias: saved[name] for alias, name in aliases if name in saved}
    with _as_torch_does():
        set_model_state_dict(model, saved, options=StateDictOptions(full_state_dict=True))
    aggregation.divide_sums(model)
    if found is not None:
        found[0]._loaded(path, None)


def place(strategy: Strategy, path: str | Path) -> Path:
    """Where this process saves: ranks that do not save together must not write the same files.

    Args:
        strategy: of the model.
        path: what the program says. It is rank 0's; rank r has ``rank-r/`` before the name.

    >>> place(Strategy(), "run/epoch-3").as_posix()
    'run/epoch-3'
    """
    path, rank = Path(path), int(os.environ.get("RANK", 0))
    if strategy._chief_saves or strategy.num_replicas_in_sync > 1 or not rank:
        return path
    return path.parent / f"rank-{rank}" / path.name


@contextmanager
def _settled(strategy: Strategy, failed: str) -> Iterator[None]:
    """Leave it together: what one replica could not do is an error of all.

    Raises:
        StrategyError: a replica has raised.
    """
    from torch.distributed.checkpoint import CheckpointException

    error: Any = None
    try:
        yield
    except CheckpointException as raised:  # on all ranks: whose error is it?
        error = raised.failures.get(strategy._replica, [None])[0]
    except Exception as raised:
        error = raised
    failures = strategy._failures("checkpoint", error)
    if isinstance(error, StrategyError):
        raise error
    if failures:
        raise StrategyError(f"{failed}: {'; '.join(failures)}") from error


def _aliases(model: nn.Module) -> dict[str, str]:
    """Each further name of a tensor that has several, such as a tied weight -> its first."""
    first: dict[int, str] = {}
    names = {k: first.setdefault(id(t), k) for k, t in model.state_dict(keep_vars=True).items()}
    return {name: known for name, known in names.items() if name != known}


def _state(model: nn.Module, optimizer: Optimizer | None) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    weights, state = get_state_dict(model, [] if optimizer is None else [optimizer])
    return {"model": weights} | ({} if optimizer is None else {"optimizer": state})


def _dcp() -> Any:
    return importlib.import_module("torch.distributed.checkpoint")


def _alone(strategy: Strategy) -> bool:
    return strategy._chief_saves or strategy.num_replicas_in_sync == 1


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
