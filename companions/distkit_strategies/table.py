"""Which strategy supports which way to train: a table that is made by trying."""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from functools import partial, update_wrapper
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from distkit.data import digits
from distkit.errors import DistkitError, StrategyError
from distkit_strategies.central_storage import CentralStorageStrategy
from distkit_strategies.fully_sharded import FullyShardedStrategy
from distkit_strategies.mirrored import MirroredStrategy
from distkit_strategies.model import Model
from distkit_strategies.multi_worker import MultiWorkerMirroredStrategy
from distkit_strategies.one_device import OneDeviceStrategy
from distkit_strategies.parameter_server import ParameterServerStrategy
from distkit_strategies.strategy import Strategy
from distkit_strategies.tpu import TPUStrategy

#: Results that differ by no more than this, in float64, are equal: sums in another order.
EQUAL = 1e-12
ROWS, BATCH, EPOCHS = 210, 50, 2


class Outcome(NamedTuple):
    """What a rank tells of a try: its results, or why there are none."""

    found: Tensor | None
    refused: str = ""


class Support(dict[str, dict[str, str]]):
    """What each strategy did in each way to train; shown as a table."""

    def __repr__(self) -> str:
        width = max(map(len, self))
        lines = [(s, way, said) for s, cells in self.items() for way, said in cells.items()]
        return "\n".join(f"{s:{width}}  {way:16}  {said}" for s, way, said in lines)

    def _repr_html_(self) -> str:
        """Strategies down, ways to train across."""
        style = 'style="text-align: left; vertical-align: top"'
        head = "".join(f"<th {style}>{way}</th>" for way in WAYS)
        rows = "".join(
            f"<tr><td {style}><code>{name}</code></td>"
            + "".join(f"<td {style}>{html.escape(said)}</td>" for said in cells.values())
            + "</tr>"
            for name, cells in self.items()
        )
        return f"<table><thead><tr><th></th>{head}</tr></thead><tbody>{rows}</tbody></table>"


def support(run: Callable[..., Any], only: Sequence[str] | None = None) -> Support:
    """Try every strategy in every way to train, and compare the results with one process.

    Each cell says "equal to one process", "differs by …" (the largest difference of losses and
    outputs, relative to the largest of them) or "refused because …".

    Args:
        run: ``cluster.run`` of a cluster of a few ranks, with a server for those who need one:
            ``dk.Cluster(workers=3, servers=1)``.
        only: the names of strategies to try; None for all of :data:`STRATEGIES`.

    Example:
        >>> dk.strategies.support(cluster.run)                        # doctest: +SKIP
    """
    expected = {way: _tried(do, Strategy()).found for way, do in WAYS.items()}
    table = Support()
    for name in STRATEGIES if only is None else only:
        make = STRATEGIES[name]
        table[name] = {way: _cell(run, make, do, expected[way]) for way, do in WAYS.items()}
    return table


def _cell(run: Callable[..., Any], make: Any, do: Any, expected: Tensor | None) -> str:
    try:
        outcomes = run(update_wrapper(partial(_tried, do), do), make()).results
    except StrategyError as error:
        outcomes = [Outcome(None, str(error))]
    refusals = [o.refused for o in outcomes if o.refused]
    if refusals:
        return f"refused because {refusals[0].split('. ')[0].rstrip('.')}"
    assert expected is not None
    worst = max(float((o.found - expected).abs().max() / expected.abs().max()) for o in outcomes)
    return "equal to one process" if worst <= EQUAL else f"differs by {worst:.1e}"


def _tried(do: Callable[[Strategy], Tensor], strategy: Strategy) -> Outcome:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return Outcome(do(strategy))
    except DistkitError as error:
        return Outcome(None, str(error))
    finally:
        torch.set_num_threads(threads)


# -- the ways to train -------------------------------------------------------------------------


def _data() -> tuple[Tensor, Tensor]:
    images, labels = digits()
    return images[:ROWS].double(), labels[:ROWS]


def _model(strategy: Strategy) -> Model:
    with strategy.scope():
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)).double()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        return Model(module, optimizer)


def _fit(strategy: Strategy) -> Tensor:
    """Losses, and the trained model's outputs."""
    model = _model(strategy)
    history = model.fit(_data(), global_batch=BATCH, epochs=EPOCHS, verbose=False)
    return _joined(history["loss"], model.predict(_data()[0], global_batch=BATCH))


def _custom_loop(strategy: Strategy) -> Tensor:
    """The last loss, and the outputs, of a loop of one's own."""
    model = _model(strategy)
    module, optimizer = model.module, model.optimizer

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(module(x), y)
        loss.backward()
        optimizer.step()
        return loss

    for _ in range(EPOCHS):
        for x, y in strategy.distribute_dataset(_data(), BATCH):
            loss = strategy.reduce("mean", strategy.run(step, args=(x, y)))
    return _joined([loss.item()], strategy.run(module, args=(_data()[0],)))


def _evaluate(strategy: Strategy) -> Tensor:
    """An evaluation, and the outputs for each row."""
    model = _model(strategy)
    results = model.evaluate(_data(), global_batch=BATCH)
    return _joined(list(results.values()), model.predict(_data()[0], global_batch=BATCH))


def _joined(numbers: list[float], outputs: Tensor) -> Tensor:
    return torch.cat([torch.tensor(numbers, dtype=torch.float64), outputs.detach().reshape(-1)])


#: Each way to train.
WAYS = {"fit": _fit, "custom loop": _custom_loop, "evaluate/predict": _evaluate}

#: Each strategy, by the name of its row.
STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "Strategy (default)": Strategy,
    "OneDeviceStrategy": OneDeviceStrategy,
    "MirroredStrategy": MirroredStrategy,
    "MultiWorkerMirroredStrategy": MultiWorkerMirroredStrategy,
    "CentralStorageStrategy": CentralStorageStrategy,
    "ParameterServerStrategy, sync": partial(ParameterServerStrategy, mode="sync"),
    "ParameterServerStrategy, async": ParameterServerStrategy,
    "FullyShardedStrategy": FullyShardedStrategy,
    "TPUStrategy": TPUStrategy,
}
