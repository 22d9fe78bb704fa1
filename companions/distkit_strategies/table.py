"""A table of the training methods that each strategy supports, computed by running them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from distkit.data import digits
from distkit.errors import DistkitError, StrategyError
from distkit_strategies.model import Model
from distkit_strategies.parameter_server import ParameterServerStrategy
from distkit_strategies.strategy import Strategy

if TYPE_CHECKING:
    import pandas

#: Relative tolerance for float64 results, which may be summed in a different order.
TOLERANCE = 1e-12
ROWS, BATCH, EPOCHS = 210, 50, 2


def support(run: Callable[..., Any], only: Sequence[str] | None = None) -> pandas.DataFrame:
    """Run every strategy with every training method; compare the results with those of one process.

    Each cell is "equal to one process", "differs by …" (the largest difference in a loss or an
    output, relative to the largest of them) or "not supported: …".

    Args:
        run: ``cluster.run`` of a small cluster with a parameter server, such as
            ``dk.Cluster(workers=3, servers=1)``.
        only: names of strategies; None for all.

    Example:
        >>> dk.strategies.support(cluster.run)                        # doctest: +SKIP
    """
    import pandas as pd

    strategies = _strategies()
    reference = _train_all({method: Strategy() for method in METHODS})
    rows = {name: _row(run, strategies[name], reference) for name in only or strategies}
    return pd.DataFrame.from_dict(rows, orient="index")


def _strategies() -> dict[str, Callable[[], Strategy]]:
    """Return this package's strategies by name, with both modes of the parameter server."""
    import distkit_strategies

    classes = {
        name: value
        for name, value in vars(distkit_strategies).items()
        if isinstance(value, type) and issubclass(value, Strategy)
    }
    sync = {"ParameterServerStrategy, sync": partial(ParameterServerStrategy, mode="sync")}
    return dict(sorted((classes | sync).items()))


def _row(run: Callable[..., Any], make: Any, reference: dict[str, Any]) -> dict[str, str]:
    row: dict[str, str] = {}
    try:
        instances = {method: make() for method in reference}
        # servers hold the variables of only one strategy in a run
        one_run = not isinstance(instances["fit"], ParameterServerStrategy)
        for strategies in [instances] if one_run else [{m: s} for m, s in instances.items()]:
            results = run(_train_all, strategies).results
            for method in strategies:
                row[method] = _cell([result[method] for result in results], reference[method])
    except StrategyError as error:
        return dict.fromkeys(reference, _cell([str(error)], None))
    return row


def _cell(results: list[Any], expected: Any) -> str:
    for error in (result for result in results if isinstance(result, str)):
        return f"not supported: {error.split('. ')[0].rstrip('.')}"
    difference = max(float((f - expected).abs().max() / expected.abs().max()) for f in results)
    return "equal to one process" if difference <= TOLERANCE else f"differs by {difference:.1e}"


def _train_all(strategies: dict[str, Strategy]) -> dict[str, Tensor | str]:
    """Return the results of each training method under its strategy."""
    return {method: _train_results(METHODS[method], s) for method, s in strategies.items()}


def _train_results(train: Callable[[Model], Iterable[float]], strategy: Strategy) -> Tensor | str:
    """Return the results of a training method and the model's outputs, or the error."""
    try:
        with strategy.scope():
            torch.manual_seed(0)
            module = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)).double()
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
            model = Model(module, optimizer)
        results = torch.tensor([*train(model)], dtype=torch.float64)
        return torch.cat([results, model.predict(_data()[0], global_batch=BATCH).reshape(-1)])
    except DistkitError as error:
        return str(error)


def _data() -> tuple[Tensor, Tensor]:
    images, labels = digits()
    return images[:ROWS].double(), labels[:ROWS]


# -- training methods and their results ------------------------------------------------------


def _fit(model: Model) -> list[float]:
    return model.fit(_data(), global_batch=BATCH, epochs=EPOCHS, verbose=False)["loss"]


def _custom_loop(model: Model) -> list[float]:
    def step(x: Tensor, y: Tensor) -> Tensor:
        model.optimizer.zero_grad()
        loss = F.cross_entropy(model.module(x), y)
        loss.backward()
        model.optimizer.step()
        return loss

    for x, y in [*model.strategy.distribute_dataset(_data(), BATCH)] * EPOCHS:
        loss = model.strategy.reduce("mean", model.strategy.run(step, args=(x, y)))
    return [loss.item()]


def _evaluate(model: Model) -> Iterable[float]:
    return model.evaluate(_data(), global_batch=BATCH).values()


#: The training method of each column, by name.
METHODS: dict[str, Callable[[Model], Iterable[float]]] = {
    "fit": _fit,
    "custom loop": _custom_loop,
    "evaluate/predict": _evaluate,
}
