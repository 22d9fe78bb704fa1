"""What :meth:`.Model.fit` calls between steps and epochs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distkit.errors import StrategyError
from distkit_strategies import checkpoint

if TYPE_CHECKING:
    from distkit_strategies.model import Model

#: The results of a step or an epoch, by name; the same on all replicas.
Logs = dict[str, float]


class Callback:
    """Does nothing: override what you need. Every replica has one and calls it at the same time.

    ``self.model`` is the :class:`.Model` that is trained. Work that must happen once, such as
    writing a file, is for ``self.model.is_chief``.
    """

    model: Model

    def on_train_begin(self) -> None:
        """Before the first epoch."""

    def on_epoch_begin(self, epoch: int) -> None:
        """Before each epoch, counted from 0."""

    def on_batch_end(self, step: int) -> None:
        """After each step of an epoch, counted from 0."""

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        """After each epoch, with its results."""

    def on_train_end(self) -> None:
        """After the last epoch."""


class EarlyStopping(Callback):
    """Ends training when a result has not become better for some epochs.

    Args:
        monitor: the result, for example "loss" or "val_accuracy".
        patience: so many epochs without a better value are allowed.
        mode: "min" or "max", whichever is better.

    Raises:
        ValueError: another mode.
    """

    def __init__(self, monitor: str = "loss", patience: int = 0, mode: str = "min") -> None:
        self.monitor, self.patience = monitor, patience
        if mode not in ("min", "max"):
            raise ValueError(f'EarlyStopping(mode={mode!r}): give "min" or "max".')
        self._sign = 1.0 if mode == "min" else -1.0

    def on_train_begin(self) -> None:
        """Forget earlier values."""
        self._best, self._waited = float("inf"), 0

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        """Compare with the best value so far."""
        value = self._sign * _result(logs, self.monitor)
        self._waited = 0 if value < self._best else self._waited + 1
        self._best = min(self._best, value)
        self.model.stop_training = self._waited > self.patience


class LearningRate(Callback):
    """Sets the learning rate of each epoch.

    Args:
        schedule: epoch, counted from 0, and the present rate -> rate.
    """

    def __init__(self, schedule: Callable[[int, float], float]) -> None:
        self.schedule = schedule

    def on_epoch_begin(self, epoch: int) -> None:
        """Set it for all groups of parameters."""
        for group in self.model.optimizer.param_groups:
            group["lr"] = self.schedule(epoch, group["lr"])


class Checkpoint(Callback):
    """Saves a checkpoint after each epoch, and goes on from the latest one in the folder.

    Args:
        folder: gets a folder for each epoch; visible to all ranks.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def on_train_begin(self) -> None:
        """Load the latest checkpoint, if there is one."""
        mine = checkpoint.place(self.model.strategy, self.folder / "epoch").parent
        epochs = [int(f.parent.name[6:]) for f in mine.glob("epoch-*/.metadata")]
        latest = self.model.strategy._decide(max(epochs, default=-1))  # the same for all
        if latest >= 0:
            self.model.load(self._epoch(latest))

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        """Save."""
        self.model.save(self._epoch(epoch))

    def _epoch(self, number: int) -> Path:
        return self.folder / f"epoch-{number:05d}"


class TensorBoard(Callback):
    """Writes each epoch's results as summaries for TensorBoard; the chief does.

    Args:
        folder: where event files go.

    Raises:
        StrategyError: tensorboard is not installed.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = str(folder)

    def on_train_begin(self) -> None:
        """Open the file."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise StrategyError(
                "TensorBoard summaries need the package tensorboard, which is not installed. "
                "Install it with `pip install tensorboard`, or leave this callback out."
            ) from None
        self._writer: Any = SummaryWriter(self.folder) if self.model.is_chief else None

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        """Write the results."""
        if self._writer is not None:
            for name, value in logs.items():
                self._writer.add_scalar(name, value, epoch)

    def on_train_end(self) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()


def _result(logs: Logs, name: str) -> float:
    if name not in logs:
        raise StrategyError(f"There is no result {name!r} to watch. There are: {', '.join(logs)}.")
    return logs[name]
