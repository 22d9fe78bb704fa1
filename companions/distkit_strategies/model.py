"""Keras-like training under any strategy: fit, evaluate and predict."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from distkit.data import Metric, correct, total
from distkit.errors import StrategyError
from distkit.recording.recorder import mark
from distkit_strategies import checkpoint
from distkit_strategies.replica import get_strategy
from distkit_strategies.variables import synchronize_buffers

#: The results of an epoch by name, which are the same on all replicas.
Logs = dict[str, float]


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return 1 for each row whose largest output is at the index of its target, and 0 otherwise.

    >>> accuracy(torch.tensor([[0.1, 0.9], [0.8, 0.2]]), torch.tensor([1, 1]))
    tensor([1., 0.])
    """
    return correct(outputs, targets).float()


class Model:
    """A module with ``fit``, ``evaluate`` and ``predict``; create it in a strategy's scope.

    Each batch's rows are divided among the replicas. Results are means over all rows, so they do
    not depend on the number of replicas.

    Args:
        module: the network.
        optimizer: the optimizer of its parameters; None for a model that is not trained.
        loss: a function of outputs and targets that returns the unweighted mean over rows. For
            tokens in rows of different lengths, or for class weights, divide the sum by the number
            of rows.
        metrics: functions by name that return one value per row; the results contain their means.

    Raises:
        StrategyError: the loss returns a value per row, in training or evaluation.
        ValueError: a metric does not return a value per row, in training or evaluation.

    Source:
        Keras, ``Model.fit``.

    >>> torch.manual_seed(0)
    <torch._C.Generator object at ...>
    >>> x = torch.randn(60, 4)
    >>> model = Model(net := nn.Linear(4, 2), torch.optim.SGD(net.parameters(), lr=0.5))
    >>> history = model.fit((x, (x[:, 0] > 0).long()), global_batch=20, epochs=20, verbose=False)
    >>> history["accuracy"][-1] > 0.9, len(model.predict(x))
    (True, 60)
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer | None = None,
        loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
        metrics: Mapping[str, Metric] | None = None,
    ) -> None:
        self.strategy = get_strategy()
        self.module, self._optimizer, self.loss = module, optimizer, loss
        self.metrics = {"accuracy": accuracy} if metrics is None else dict(metrics)
        self.epoch = 0
        self.stop_training = False

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer.

        Raises:
            StrategyError: the model has none.
        """
        if self._optimizer is None:
            raise StrategyError("This model has no optimizer. Pass one to Model(...) to train it.")
        return self._optimizer

    @property
    def is_chief(self) -> bool:
        """True on the chief, which prints and writes summaries."""
        return self.strategy._chief

    def fit(
        self,
        data: Any,
        *,
        global_batch: int = 32,
        epochs: int = 1,
        validation_data: Any = None,
        callbacks: Sequence[Callback] = (),
        shuffle: bool = True,
        seed: int = 0,
        verbose: bool = True,
    ) -> dict[str, list[float]]:
        """Train up to epoch ``epochs``.

        Args:
            data: inputs and targets; see :meth:`.Strategy.distribute_dataset`.
            global_batch: the number of rows per step, over all replicas.
            epochs: the last epoch, counted from 1, including the epochs of a loaded checkpoint.
            validation_data: data to evaluate after each epoch, for the results ``val_…``.
            callbacks: callbacks, called on every replica.
            shuffle: whether each epoch has a new random order.
            seed: the seed for the random orders.
            verbose: whether the chief prints a line per epoch.

        Returns:
            The results by name, each with one value per epoch.
        """
        batches = self.strategy.distribute_dataset(data, global_batch, shuffle=shuffle, seed=seed)
        history: dict[str, list[float]] = {}
        self.stop_training = False
        self._call(callbacks, "on_train_begin")
        while self.epoch < epochs and not self.stop_training:
            logs = self._fit_epoch(batches, callbacks)
            if validation_data is not None:
                validation = self.evaluate(validation_data, global_batch=global_batch)
                logs |= {f"val_{name}": value for name, value in validation.items()}
            self.epoch += 1
            for name, value in logs.items():
                history.setdefault(name, []).append(value)
            if verbose and self.is_chief:
                print(
                    f"epoch {self.epoch}/{epochs}",
                    *(f"{name} {value:.4f}" for name, value in logs.items()),
                    sep="  ",
                )
            self._call(callbacks, "on_epoch_end", self.epoch - 1, logs)
        self._call(callbacks, "on_train_end")
        return history

    def evaluate(self, data: Any, *, global_batch: int = 32) -> Logs:
        """Return the loss and metrics over all rows, independent of the number of replicas.

        With asynchronous parameter servers, each worker is one replica and evaluates all rows with
        its current values.

        Args:
            data: inputs and targets.
            global_batch: the number of rows per step, over all replicas.
        """
        _, sums = self._each_row_once(self._step, data, global_batch)
        return self._results(sums)

    def predict(self, data: Any, *, global_batch: int = 32) -> Tensor:
        """Return the outputs for each row, in the order of the data, on every replica.

        Args:
            data: the inputs, a tensor or an array.
            global_batch: the number of rows per step, over all replicas.
        """
        plan, outputs = self._each_row_once(self.module, data, global_batch)
        steps, replicas = range(plan.steps), range(self.strategy.num_replicas_in_sync)
        rows = [row for r in replicas for step in steps for row in plan.rows(step, r)]
        gathered = self.strategy.gather(torch.cat(outputs))
        ordered = torch.empty_like(gathered)
        ordered[torch.tensor(rows, device=gathered.device)] = gathered
        return ordered

    def save(self, folder: str | Path) -> None:
        """Save the weights, optimizer state and epoch with :func:`.checkpoint.save`.

        Call it on all replicas.
        """
        checkpoint.save(self.strategy, folder, self.module, self._optimizer, epoch=self.epoch)

    def load(self, folder: str | Path) -> None:
        """Load a checkpoint written by :meth:`save`, on any number of replicas."""
        extra = checkpoint.load(self.strategy, folder, self.module, self._optimizer, epoch=0)
        self.epoch = extra["epoch"]

    # -- steps -------------------------------------------------------------------------------

    def _fit_epoch(self, batches: Any, callbacks: Sequence[Callback]) -> Logs:
        batches.set_epoch(self.epoch)
        self._call(callbacks, "on_epoch_begin", self.epoch)
        self.module.train()
        sums = []
        for step, batch in enumerate(batches):
            with mark("step"):
                sums.append(self.strategy.run(self._step, args=(*batch, True)))
            self._call(callbacks, "on_batch_end", step)
        return self._results(sums)

    def _each_row_once(self, fn: Any, data: Any, global_batch: int) -> tuple[Any, list[Any]]:
        """Return the batch plan, and a function's result for each batch, without training.

        The rows are divided among the replicas in sync, even if each worker has separate data.
        """
        strategy, was_training = self.strategy, self.module.training
        synchronize_buffers(strategy, self.module)
        share = strategy._replica, strategy.num_replicas_in_sync
        batches = strategy._batches(data, global_batch, *share, policy="DATA")
        self.module.eval()
        try:
            with torch.no_grad():
                args = (b if isinstance(b, tuple | list) else (b,) for b in batches)
                return batches.plan, [strategy.run(fn, args=batch) for batch in args]
        finally:
            self.module.train(was_training)

    def _step(self, x: Tensor, y: Tensor, training: bool = False) -> Tensor:
        """Return the number of rows, and the sums of the loss and each metric over them."""
        outputs = self.module(x)
        loss = self.loss(outputs, y)
        if loss.dim():
            raise StrategyError(
                f"The loss of Model(...) has shape {tuple(loss.shape)}, but must be the mean over "
                'the rows. Remove reduction="none".'
            )
        if training:
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        predictions, rows = outputs.detach(), torch.full_like(loss, len(y), dtype=torch.float64)
        sums = [total(metric, predictions, y) for metric in self.metrics.values()]
        return torch.stack([rows, loss.detach() * rows if len(y) else rows, *sums])

    def _results(self, sums: Sequence[Tensor]) -> Logs:
        """Return the means over all rows, from the sums of this replica's batches."""
        zeros = torch.zeros(2 + len(self.metrics), dtype=torch.float64)
        local = sum(sums, zeros.to(self.strategy.device))
        rows, *totals = self.strategy.reduce("sum", local).tolist()
        names = ["loss", *self.metrics]
        return {name: x / max(rows, 1) for name, x in zip(names, totals, strict=True)}

    def _call(self, callbacks: Sequence[Callback], hook: str, *args: Any) -> None:
        for callback in callbacks:
            callback.model = self
            getattr(callback, hook)(*args)


class Callback:
    """Base class for callbacks, which every replica calls; override the methods you need.

    ``self.model`` is the :class:`.Model` being trained. Put work that must happen once, such as
    writing a file, under ``if self.model.is_chief``.
    """

    model: Model

    def on_train_begin(self) -> None:
        """Run before the first epoch."""

    def on_epoch_begin(self, epoch: int) -> None:
        """Run before each epoch, counted from 0."""

    def on_batch_end(self, step: int) -> None:
        """Run after each step of an epoch, counted from 0."""

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        """Run after each epoch, with its results."""

    def on_train_end(self) -> None:
        """Run after the last epoch."""


class EarlyStopping(Callback):
    """Stops training when a result has not improved for some epochs.

    Args:
        monitor: the name of the result, for example "loss" or "val_accuracy".
        patience: the allowed number of consecutive epochs without improvement.
        mode: the direction of improvement, "min" or "max".

    Raises:
        ValueError: the mode is unknown.
        StrategyError: the results of an epoch do not include ``monitor``.
    """

    def __init__(self, monitor: str = "loss", patience: int = 0, mode: str = "min") -> None:
        self.monitor, self.patience = monitor, patience
        if mode not in ("min", "max"):
            raise ValueError(f'EarlyStopping needs mode "min" or "max"; got {mode!r}.')
        self._sign = 1.0 if mode == "min" else -1.0

    def on_train_begin(self) -> None:
        """Reset the best value."""
        self._best, self._waited = float("inf"), 0

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        """Compare with the best value."""
        if self.monitor not in logs:
            names = ", ".join(logs)
            raise StrategyError(
                f"EarlyStopping cannot monitor {self.monitor!r}. Available results: {names}."
            )
        value = self._sign * logs[self.monitor]
        self._waited = 0 if value < self._best else self._waited + 1
        self._best = min(self._best, value)
        self.model.stop_training = self._waited > self.patience


class LearningRate(Callback):
    """Sets the learning rate of each epoch.

    Args:
        schedule: a function that receives the epoch, counted from 0, and the current rate, and
            returns the new rate.
    """

    def __init__(self, schedule: Callable[[int, float], float]) -> None:
        self.schedule = schedule

    def on_epoch_begin(self, epoch: int) -> None:
        """Set the rate of all parameter groups."""
        for group in self.model.optimizer.param_groups:
            group["lr"] = self.schedule(epoch, group["lr"])


class Checkpoint(Callback):
    """Saves a checkpoint after each epoch and resumes from the latest one in the folder.

    Args:
        folder: the folder for the checkpoints, visible to all ranks; each epoch has a subfolder.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def on_train_begin(self) -> None:
        """Load the latest checkpoint, if one exists."""
        folder = checkpoint.rank_path(self.model.strategy, self.folder / "epoch").parent
        epochs = [int(f.parent.name[6:]) for f in folder.glob("epoch-*/.metadata")]
        latest = self.model.strategy._broadcast_number(
            max(epochs, default=-1)
        )  # the same on all replicas
        if latest >= 0:
            self.model.load(self._epoch(latest))

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        """Save a checkpoint."""
        self.model.save(self._epoch(epoch))

    def _epoch(self, number: int) -> Path:
        return self.folder / f"epoch-{number:05d}"


class TensorBoard(Callback):
    """Writes each epoch's results as TensorBoard summaries, on the chief.

    Args:
        folder: the folder for the event files.

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
                "Install it with `pip install tensorboard`, or remove this callback."
            ) from None
        self._writer: Any = SummaryWriter(self.folder) if self.model.is_chief else None

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        """Write the results."""
        for name, value in logs.items() if self._writer else ():
            self._writer.add_scalar(name, value, epoch)

    def on_train_end(self) -> None:
        """Close the file."""
        if self._writer:
            self._writer.close()
