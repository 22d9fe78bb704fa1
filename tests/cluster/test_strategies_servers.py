"""Training with parameter servers gives the results of one process and survives crashes."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from training import training_step
from waiting import wait_until

import distkit as dk
from distkit.errors import RankError, StrategyError
from distkit_strategies import (
    Callback,
    Checkpoint,
    ClusterCoordinator,
    FixedShardsPartitioner,
    MirroredStrategy,
    Model,
    ParameterServerStrategy,
    Strategy,
    load,
    save,
)

X = torch.randn(60, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = (X.sum(1) > 0).long()


@pytest.fixture(scope="module")
def cluster() -> Iterator[dk.Cluster]:
    with dk.Cluster(workers=2, servers=2) as cluster:
        yield cluster


def train(strategy: Strategy, make=torch.optim.Adam, epochs: int = 2, flag: str = ""):
    """Return losses and weights; the last batch of the 60 rows is smaller than the others."""
    torch.manual_seed(int(os.environ.get("RANK", 0)))
    with strategy.scope():
        model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8, affine=False), nn.Linear(8, 2))
        model[1].eval()
        model.double()
        optimizer = make(model.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

    step = training_step(model, optimizer)
    losses = []
    for _ in range(epochs):
        for x, y in strategy.distribute_dataset((X, Y), global_batch=22):
            losses.append(strategy.reduce("mean", strategy.run(step, args=(x, y))).item())
            if flag and len(losses) == 3 and os.environ["RANK"] == "1":
                die_once(flag)
        schedule.step()
    return losses, nn.utils.parameters_to_vector(model.parameters()).detach()


def die_once(flag: str) -> None:
    if not Path(flag).exists():
        Path(flag).touch()
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("partitioner", [None, FixedShardsPartitioner(3)])
def test_synchronous_training_equals_one_process(cluster, partitioner) -> None:
    losses, weights = train(Strategy())
    for found in cluster.run(train, ParameterServerStrategy(partitioner, mode="sync")).results:
        torch.testing.assert_close(found[0], losses, rtol=0, atol=1e-12)
        torch.testing.assert_close(found[1], weights, rtol=0, atol=1e-12)


def test_async_workers_step_independently(cluster) -> None:
    run = cluster.run(train, ParameterServerStrategy(), torch.optim.Adam, 20)
    for losses, weights in run.results:
        assert len(losses) == 20 * 2  # 60 rows, 2 workers, batches of 22
        assert sum(losses[-4:]) / 4 < 0.5 and weights.isfinite().all()
    assert max(losses[0] for losses, _ in run.results) > 0.6  # of the worker that started first


def test_dead_worker_is_replaced_and_restarts_training(cluster, tmp_path) -> None:
    with pytest.warns(dk.errors.CommunicationWarning, match="worker 1 exited .* was replaced"):
        run = cluster.run(
            train, ParameterServerStrategy(), torch.optim.Adam, 20, str(tmp_path / "died")
        )
    assert all(len(losses) == 40 and sum(losses[-4:]) / 4 < 0.5 for losses, _ in run.results)


def test_dead_worker_in_sync_mode_raises(cluster, tmp_path) -> None:
    with pytest.raises(dk.errors.RankDied, match="worker 1"):
        cluster.run(train, ParameterServerStrategy(mode="sync"), flag=str(tmp_path / "died"))
    assert len(cluster.run(train, MirroredStrategy()).results) == 2  # the cluster still works


def adding_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Return a step that adds 1 to each weight if the learning rate is 1."""

    def step() -> None:
        optimizer.zero_grad()
        (-model.weight.sum()).backward()
        optimizer.step()

    return step


def add_ones(strategy: Strategy, started: str, killed: str):
    """Schedule functions that each add 1, until the test has killed a server."""
    with strategy.scope():
        model = nn.Linear(4, 4, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    step = adding_step(model, optimizer)
    coordinator, count = ClusterCoordinator(strategy), 0
    while count < 30 or not Path(killed).exists():
        coordinator.schedule(strategy.run, (step,)).fetch()
        Path(started).touch()
        count += 1
    coordinator.join()
    return (model.weight - count).unique().tolist()


def test_killed_server_with_a_replica_loses_no_data(cluster, tmp_path) -> None:
    started, killed = tmp_path / "started", tmp_path / "killed"
    strategy = ParameterServerStrategy(FixedShardsPartitioner(2), replication=2)
    run = cluster.submit(add_ones, strategy, str(started), str(killed))
    wait_until(started.exists, 60)
    cluster.kill("server 0")
    killed.touch()
    with pytest.warns(dk.errors.CommunicationWarning, match="server 0 exited"):
        assert run.results[0] == [0]


def step_outside(strategy: Strategy) -> None:
    with strategy.scope():
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()


def two_optimizers(strategy: Strategy) -> None:
    with strategy.scope():
        models = [nn.Linear(2, 1), nn.Linear(2, 1)]

    def step(model: nn.Module) -> None:
        model(torch.ones(1, 2)).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()

    for model in models:
        strategy.run(step, args=(model,))


def nan_gradient(strategy: Strategy) -> None:
    with strategy.scope():
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        (model(x).mean() * float("nan")).backward()
        optimizer.step()

    strategy.run(step, args=(torch.ones(0, 2),))  # no rows: nothing is pushed
    assert model.weight.isfinite().all()
    strategy.run(step, args=(torch.ones(1, 2),))


def model_after_coordinator(strategy: Strategy) -> None:
    ClusterCoordinator(strategy)
    with strategy.scope():
        nn.Linear(2, 1)


@pytest.mark.parametrize(
    ("function", "strategy", "message"),
    [
        (step_outside, ParameterServerStrategy(), "outside `run`"),
        (two_optimizers, ParameterServerStrategy(), "a second optimizer"),
        (
            nan_gradient,
            ParameterServerStrategy(),
            r"TrainingError: .*Linear.weight is not finite on worker \d in run 2",
        ),
        (model_after_coordinator, ParameterServerStrategy(), "created after ClusterCoordinator"),
        (ClusterCoordinator, ParameterServerStrategy(mode="sync"), 'mode="async"'),
        (ClusterCoordinator, MirroredStrategy(), "ParameterServerStrategy"),
        *[
            (
                train,
                ParameterServerStrategy(lambda shape, dtype, shards=shards: shards),
                re.escape(f"variable_partitioner returned {shards} for a variable of shape ("),
            )
            for shards in (None, [0, 1], [1, 1, 1])
        ],
    ],
)
def test_unsupported_program_raises(cluster, function, strategy, message: str) -> None:
    with pytest.raises(RankError, match=message):
        cluster.run(function, strategy)


def train_sparse(strategy: Strategy) -> float:
    """Take a step on an embedding, with a sparse gradient of 1 for each use of a row."""
    with strategy.scope():
        model = nn.Embedding(4, 2, sparse=True).double()
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def step(rows: Tensor) -> None:
        optimizer.zero_grad()
        model(rows).sum().backward()
        optimizer.step()

    strategy.run(step, args=(torch.tensor([1, 1, 3]),))
    strategy.store.barrier()
    strategy.pull()
    return model.weight.sum().item()


def test_sparse_gradients_are_pushed_as_dense_tensors(cluster) -> None:
    assert cluster.run(train_sparse, ParameterServerStrategy()).results == [-12.0] * 2


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: train(ParameterServerStrategy()), r"dk.Cluster\(workers=2, servers=1\)"),
        (lambda: ParameterServerStrategy(mode="half"), '"async" or "sync"'),
        (lambda: ParameterServerStrategy(3), "must be callable"),
    ],
)
def test_missing_servers_and_invalid_options_raise(call, message: str) -> None:
    with pytest.raises(StrategyError, match=message):
        call()


def train_with_checkpoint(strategy: Strategy, folder: str, action: str):
    """Train two epochs and save a checkpoint after the first, or load it and train the second."""
    with strategy.scope():
        model = nn.Linear(6, 2).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    step = training_step(model, optimizer)

    def epoch() -> None:
        for x, y in strategy.distribute_dataset((X, Y), global_batch=20):
            strategy.run(step, args=(x, y))

    if action == "save":
        epoch()
        save(strategy, folder, model, optimizer, epoch=1)
    elif strategy.store.rank:
        assert load(strategy, folder, model, optimizer, epoch=0) == {"epoch": 1}
    else:
        with pytest.warns(UserWarning, match="servers start with a new optimizer"):
            assert load(strategy, folder, model, optimizer, epoch=0) == {"epoch": 1}
    epoch()
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def test_checkpoint_has_the_values_of_the_servers(cluster, tmp_path) -> None:
    strategy = ParameterServerStrategy(FixedShardsPartitioner(2), mode="sync")
    (weights, _) = cluster.run(train_with_checkpoint, strategy, str(tmp_path), "save").results
    for found in cluster.run(train_with_checkpoint, strategy, str(tmp_path), "load").results:
        torch.testing.assert_close(found, weights, rtol=0, atol=1e-12)


def train_by_coordinator(strategy: Strategy, folder: str, action: str):
    with strategy.scope():
        model = nn.Linear(3, 1, bias=False).double()
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    step = adding_step(model, optimizer)
    coordinator = ClusterCoordinator(strategy)
    if action == "load":
        load(strategy, folder, model)
    for n in range(4):
        coordinator.schedule(strategy.run, (step,))
        coordinator.join()
        if action == "save" and n == 1:
            save(strategy, folder, model)
    return model.weight.unique().tolist()


def test_coordinator_saves_and_loads(cluster, tmp_path) -> None:
    saved = cluster.run(
        train_by_coordinator, ParameterServerStrategy(), str(tmp_path), "save"
    ).results[0]
    assert saved == [4.0]
    more = cluster.run(
        train_by_coordinator, ParameterServerStrategy(), str(tmp_path), "load"
    ).results[0]
    assert more == [2.0 + 4.0]


def load_and_die(strategy: Strategy, folder: str, victim: str, steps: int, flag: str) -> float:
    """Add 1 to the loaded weight five times on the victim; it dies once, after step ``steps``."""
    with strategy.scope():
        model = nn.Linear(1, 1, bias=False).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    step = adding_step(model, optimizer)
    mine = os.environ["RANK"] == victim
    load(strategy, folder, model)
    for n in range(5 if mine else 0):
        strategy.run(step)
        if n + 1 == steps:
            die_once(flag)
    return model.weight.item()


def test_checkpoint_is_loaded_once_despite_a_crash(cluster, tmp_path) -> None:
    victim, steps = "1", 3
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.constant_(model.weight, 100.0)
    save(Strategy(), tmp_path / "saved", model)
    with pytest.warns(
        dk.errors.CommunicationWarning, match=f"worker {victim} exited .* was replaced"
    ):
        run = cluster.run(
            load_and_die,
            ParameterServerStrategy(),
            str(tmp_path / "saved"),
            victim,
            steps,
            str(tmp_path / "died"),
        )
    assert run.results[int(victim)] == 100 + steps + 5


class DieOnce(Callback):
    """Kills worker 1 once, after an epoch was saved; worker 0 waits until worker 1 has finished."""

    def __init__(self, folder: str) -> None:
        self.folder, self.worker = Path(folder), os.environ["RANK"]

    def on_batch_end(self, step: int) -> None:
        if self.worker == "1":
            wait_until((self.folder / "epoch-00000/.metadata").exists, 60)
            die_once(str(self.folder / "died"))

    def on_train_end(self) -> None:
        if self.worker == "1":
            (self.folder / "done").touch()
        wait_until((self.folder / "done").exists, 60)


def fit(strategy: Strategy, folder: str) -> int:
    with strategy.scope():
        net = nn.Linear(6, 2).double()
        model = Model(net, torch.optim.SGD(net.parameters(), lr=0.1))
    history = model.fit(
        (X, Y), epochs=2, callbacks=[Checkpoint(folder), DieOnce(folder)], verbose=False
    )
    return len(history["loss"])


def test_replacement_resumes_fit_from_the_checkpoint(cluster, tmp_path) -> None:
    with pytest.warns(dk.errors.CommunicationWarning, match="worker 1 exited .* was replaced"):
        run = cluster.run(fit, ParameterServerStrategy(), str(tmp_path))
    assert run.results == [2, 2]
