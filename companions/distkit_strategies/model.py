"""Keras's way to train: fit, evaluate and predict, under any strategy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from distkit.data.evaluation import Metric, correct, total
from distkit.errors import StrategyError
from distkit.recording.progress import progress
from distkit_strategies import aggregation, checkpoint
from distkit_strategies.callbacks import Callback, Logs
from distkit_strategies.context import get_strategy


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """1 for each row whose largest output is at its target.

    >>> accuracy(torch.tensor([[0.1, 0.9], [0.8, 0.2]]), torch.tensor([1, 1]))
    tensor([1., 0.])
    """
    return correct(outputs, targets).float()


class Model:
    """A module with ``fit``, ``evaluate`` and ``predict``; make it in a strategy's scope.

    Each batch's rows are divided among the replicas. Results are sums over all rows divided by
    their number, so they do not depend on the number of replicas.

    Args:
        module: the network.
        optimizer: of its parameters; None for a model that is not trained.
        loss: the mean over the rows of outputs and targets: each row counts the same. A mean over
            tokens of which rows have different numbers, or over class weights, is none: divide
            their sum by the rows.
        metrics: values per row, by name; their mean is a result.

    Raises:
        StrategyError: when it trains or evaluates: a loss per row.
        ValueError: likewise: a metric that is no value per row.

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
            StrategyError: the model was made without one.
        """
        if self._optimizer is None:
            raise StrategyError("This model has no optimizer: give Model(...) one to train it.")
        return self._optimizer

    @property
    def is_chief(self) -> bool:
        """True on replica 0, which prints, and writes summaries."""
        return self.strategy._chief

    # -- what a program uses -----------------------------------------------------------------

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
        """Train until ``epochs`` epochs have been made in all.

        Args:
            data: inputs and targets, see :meth:`.Strategy.distribute_dataset`.
            global_batch: rows of all replicas in a step.
            epochs: the last epoch, counted from 1; a loaded checkpoint counts.
            validation_data: evaluated after each epoch, as results ``val_…``.
            callbacks: called on every replica.
            shuffle: each epoch in another random order.
            seed: of that order.
            verbose: the chief prints a line after each epoch.

        Returns:
            Each result, epoch by epoch.
        """
        batches = self.strategy.distribute_dataset(data, global_batch, shuffle=shuffle, seed=seed)
        history: dict[str, list[float]] = {}
        with self._called(callbacks):
            while self.epoch < epochs and not self.stop_training:
                logs = self._fit_epoch(batches, callbacks)
                if validation_data is not None:
                    found = self.evaluate(validation_data, global_batch=global_batch)
                    logs |= {f"val_{name}": value for name, value in found.items()}
                self.epoch += 1
                for name, value in logs.items():
                    history.setdefault(name, []).append(value)
                self._tell(epochs, logs, verbose)
                for each in callbacks:
                    each.on_epoch_end(self.epoch - 1, logs)
        return history

    def evaluate(self, data: Any, *, global_batch: int = 32) -> Logs:
        """The loss and the metrics, with each row counted once; the same on any number of replicas.

        Under asynchronous parameter servers each worker is one replica: it evaluates all rows, with
        the values that it has.

        Args:
            data: inputs and targets.
            global_batch: rows of all replicas in a step.
        """
        aggregation.synchronize_buffers(self.strategy, self.module)
        batches = self._each_row_once(data, global_batch)
        sums = self._no_sums()
        with evaluating(self.module):
            for x, y in batches:
                sums += self.strategy.run(self._test_step, args=(x, y))
        return self._results(sums)

    def predict(self, data: Any, *, global_batch: int = 32) -> Tensor:
        """The outputs for each row, in the order of the data, on every replica.

        Args:
            data: inputs alone, a tensor or an array.
            global_batch: rows of all replicas in a step.
        """
        aggregation.synchronize_buffers(self.strategy, self.module)
        batches = self._each_row_once(data, global_batch)
        with evaluating(self.module):
            mine = [self.strategy.run(self.module, args=(x,)) for x in batches]
        plan, n = batches.plan, self.strategy.num_replicas_in_sync
        rows = [k for r in range(n) for step in range(plan.steps) for k in plan.rows(step, r)]
        found = self.strategy.gather(torch.cat(mine))
        ordered = torch.empty_like(found)
        ordered[torch.tensor(rows, device=found.device)] = found
        return ordered

    def save(self, folder: str | Path) -> None:
        """Save weights, optimizer and epoch; all replicas call it. See :func:`.checkpoint.save`."""
        self._checkpoint(checkpoint.save, folder, self.epoch)

    def load(self, folder: str | Path) -> None:
        """Load what :meth:`save` saved, also with another number of replicas."""
        self.epoch = self._checkpoint(checkpoint.load, folder, 0)["epoch"]

    def _each_row_once(self, data: Any, global_batch: int) -> Any:
        """Divided among the replicas in sync, also where each worker trains on its own data."""
        mine = {"replica": self.strategy._replica, "replicas": self.strategy.num_replicas_in_sync}
        return self.strategy._batches(data, global_batch, None, policy="DATA", **mine)

    # -- steps -------------------------------------------------------------------------------

    def _fit_epoch(self, batches: Any, callbacks: Sequence[Callback]) -> Logs:
        batches.set_epoch(self.epoch)
        for each in callbacks:
            each.on_epoch_begin(self.epoch)
        self.module.train()
        sums = self._no_sums()
        for step, (x, y) in enumerate(progress(batches)):
            sums += self.strategy.run(self._train_step, args=(x, y))
            for each in callbacks:
                each.on_batch_end(step)
        return self._results(sums)

    def _train_step(self, x: Tensor, y: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        outputs = self.module(x)
        loss = self._mean_loss(outputs, y)
        loss.backward()
        self.optimizer.step()
        return self._sums(outputs, y, loss)

    def _test_step(self, x: Tensor, y: Tensor) -> Tensor:
        outputs = self.module(x)
        return self._sums(outputs, y, self._mean_loss(outputs, y))

    def _mean_loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        loss = self.loss(outputs, y)
        if loss.dim():
            raise StrategyError(
                f"The loss of Model(...) has shape {tuple(loss.shape)}, but is to be the mean over "
                'the rows. Leave out reduction="none".'
            )
        return loss

    def _sums(self, outputs: Tensor, y: Tensor, loss: Tensor) -> Tensor:
        """The number of rows, and the sums over them of the loss and of each metric."""
        if not len(y):
            return self._no_sums()
        found = outputs.detach()
        values = [total(metric, found, y) for metric in self.metrics.values()]
        rows = torch.tensor(float(len(y)), dtype=torch.float64, device=found.device)
        return torch.stack([rows, loss.detach().double() * len(y), *values])

    def _no_sums(self) -> Tensor:
        size = 2 + len(self.metrics)
        return torch.zeros(size, dtype=torch.float64, device=self.strategy.device)

    def _results(self, sums: Tensor) -> Logs:
        rows, *found = self.strategy.reduce("sum", sums).tolist()
        names = ["loss", *self.metrics]
        return {name: summed / max(rows, 1) for name, summed in zip(names, found, strict=True)}

    # -- around them -------------------------------------------------------------------------

    @contextmanager
    def _called(self, callbacks: Sequence[Callback]) -> Iterator[None]:
        self.stop_training = False
        for each in callbacks:
            each.model = self
            each.on_train_begin()
        yield
        for each in callbacks:
            each.on_train_end()

    def _tell(self, epochs: int, logs: Logs, verbose: bool) -> None:
        if verbose and self.is_chief:
            results = "  ".join(f"{name} {value:.4f}" for name, value in logs.items())
            print(f"epoch {self.epoch}/{epochs}  {results}")

    def _checkpoint(self, do: Callable[..., Any], folder: str | Path, epoch: int) -> Any:
        return do(self.strategy, folder, self.module, self._optimizer, epoch=epoch)


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """While it is open, the module evaluates, without gradients."""
    trained = module.training
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        module.train(trained)
