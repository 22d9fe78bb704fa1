"""The coordinator of a ParameterServerStrategy: scheduled functions, errors and crashes."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import distkit as dk
from distkit.errors import StrategyError
from distkit_strategies import (
    ClusterCoordinator,
    FixedShardsPartitioner,
    ParameterServerStrategy,
    Variable,
)


@pytest.fixture(scope="module")
def cluster() -> Iterator[dk.Cluster]:
    with dk.Cluster(workers=3, servers=2) as cluster:
        yield cluster


def create_model(strategy, lr: float = 1.0):
    """Return a model, and a step that subtracts ``lr`` times the batch from the model's weight."""
    with strategy.scope():
        model = nn.Linear(3, 2, bias=False).double()
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)

    def step(x):
        optimizer.zero_grad()
        (model.weight * x).sum().backward()
        optimizer.step()
        return float(x.sum())

    return model, step


def die_once(flag: str) -> None:
    """Kill this process, unless ``flag`` exists."""
    if not Path(flag).exists():
        Path(flag).touch()
        os.kill(os.getpid(), signal.SIGKILL)


def test_functions_run_on_workers_and_return_results(cluster) -> None:
    def train(strategy):
        model, step = create_model(strategy)
        coordinator = ClusterCoordinator(strategy)
        values = [
            coordinator.schedule(strategy.run, (step, (torch.full((2, 3), float(n)),)))
            for n in range(20)
        ]
        coordinator.join()
        assert coordinator.done()
        assert coordinator.schedule(lambda v: 2 * v, (values[3],)).get() == 36
        return coordinator.fetch({"all": values}), model.weight.tolist()

    run = cluster.run(train, ParameterServerStrategy(FixedShardsPartitioner(2)))
    values, weights = run.results[0]
    assert values == {"all": [6.0 * n for n in range(20)]}
    assert weights == [[-190.0] * 3] * 2
    assert run.results[1:] == [None, None]


def test_function_on_a_dead_worker_is_rescheduled_and_takes_effect_once(cluster, tmp_path) -> None:
    def train(strategy, flag):
        model, step = create_model(strategy)

        def step_and_die(x, n):
            strategy.run(step, (x,))
            if n == 7:  # after its push
                die_once(flag)
            return os.environ["RANK"]

        coordinator = ClusterCoordinator(strategy)
        worker_ranks = [
            coordinator.schedule(step_and_die, (torch.ones(2, 3), n)) for n in range(30)
        ]
        coordinator.join()
        return set(coordinator.fetch(worker_ranks)), model.weight.unique().tolist()

    flag = tmp_path / "died"
    with pytest.warns(dk.errors.CommunicationWarning, match="was replaced"):
        run = cluster.run(train, ParameterServerStrategy(), str(flag))
    worker_ranks, weights = run.results[0]
    assert weights == [-30.0] and worker_ranks <= {"1", "2"} and flag.exists()


def test_dead_coordinator_is_replaced(cluster, tmp_path) -> None:
    def train(strategy, flag):
        model, step = create_model(strategy)
        coordinator = ClusterCoordinator(strategy)
        for n in range(20):
            coordinator.schedule(strategy.run, (step, (torch.ones(2, 3),)))
            if n == 10:
                die_once(flag)
        coordinator.join()
        return model.weight.unique().tolist()

    with pytest.warns(dk.errors.CommunicationWarning, match="was replaced"):
        run = cluster.run(train, ParameterServerStrategy(), str(tmp_path / "died"))
    assert run.results[0] == [-20.0]


def test_error_is_raised_once_and_cancels_pending_functions(cluster) -> None:
    def train(strategy):
        model, step = create_model(strategy)

        def fail_at_three(n):
            if n == 3:
                raise ZeroDivisionError("three")
            return n

        coordinator = ClusterCoordinator(strategy)
        values, output = [], []
        try:
            for n in range(500):
                values.append(coordinator.schedule(fail_at_three, (n,)))
            coordinator.join()
        except ZeroDivisionError as error:
            output = [str(error), "function 3, fail_at_three, on worker" in str(error.__cause__)]
        coordinator.join()  # does not raise again
        with pytest.raises(ZeroDivisionError, match="three"):
            values[3].fetch()
        assert coordinator.fetch(values[:3]) == [0, 1, 2]
        after = coordinator.schedule(strategy.run, (step, (torch.ones(2, 3),))).get()
        coordinator.join()
        return output, after, model.weight.unique().tolist()

    assert cluster.run(train, ParameterServerStrategy()).results[0] == (
        ["three", True],
        6.0,
        [-1.0],
    )


class UnpicklingFails:
    """An object that can be pickled but not unpickled."""

    def __reduce__(self):
        return int, ("seven",)


def test_unpicklable_results_and_arguments_raise(cluster) -> None:
    def train(strategy):
        _, step = create_model(strategy)
        with strategy.scope():
            norm = nn.BatchNorm1d(2)
        coordinator = ClusterCoordinator(strategy)

        def error_of(fn, *args) -> str:
            value = coordinator.schedule(fn, args)
            with pytest.raises(StrategyError) as caught:
                value.fetch()
            with pytest.raises(StrategyError):
                coordinator.join()
            return str(caught.value)

        def return_lock():
            return threading.Lock()

        def run_batch_norm():
            norm(torch.rand(3, 2))

        with pytest.raises(StrategyError, match="already has a ClusterCoordinator"):
            ClusterCoordinator(strategy)
        output = [
            error_of(return_lock),
            error_of(UnpicklingFails),
            error_of(strategy.run, run_batch_norm),
        ]
        norm.eval()
        coordinator.schedule(run_batch_norm).fetch()
        return output, coordinator.schedule(strategy.run, (step, (torch.ones(2, 3),))).fetch()

    (locked, unpickled, normalized), after = cluster.run(train, ParameterServerStrategy()).results[
        0
    ]
    assert "return_lock, returned a value of type lock, which cannot be pickled" in locked
    assert (
        "a value of type UnpicklingFails, which cannot be pickled and unpickled: ValueError"
        in unpickled
    )
    assert "changed the buffer BatchNorm1d.running_mean" in normalized and after == 6.0


def test_each_worker_has_its_own_dataset(cluster) -> None:
    def train(strategy):
        create_model(strategy)
        coordinator = ClusterCoordinator(strategy)
        data = torch.arange(60.0)
        dataset = coordinator.create_per_worker_dataset(
            lambda: strategy.distribute_dataset(data, global_batch=10)
        )
        batches = iter(dataset)
        sums = [coordinator.schedule(lambda b: float(next(b).sum()), (batches,)) for _ in range(3)]
        return coordinator.fetch(sums)

    sums = cluster.run(train, ParameterServerStrategy()).results[0]
    evens, odds = [90.0, 290.0, 490.0], [100.0, 300.0, 500.0]
    assert len(sums) == 3 and set(sums) <= {*evens, *odds}


def test_coordinator_cannot_train_or_distribute_a_dataset(cluster) -> None:
    def train(strategy):
        create_model(strategy)
        ClusterCoordinator(strategy)
        with pytest.warns(
            UserWarning, match=r"run\(\) was called on worker 0, which is the coordinator"
        ):
            strategy.run(len, ("abc",))
        strategy.distribute_dataset(torch.arange(60.0), global_batch=10)

    with pytest.raises(
        dk.errors.RankError, match=r"no share of a dataset.*create_per_worker_dataset"
    ):
        cluster.run(train, ParameterServerStrategy())


def test_scheduled_function_cannot_create_variables(cluster) -> None:
    def train(strategy):
        create_model(strategy)
        coordinator = ClusterCoordinator(strategy)
        output = []
        for make in (lambda: nn.Linear(2, 1), lambda: Variable(1.0)):
            with pytest.raises(StrategyError) as caught:
                coordinator.schedule(strategy.run, (make,)).fetch()
            with pytest.raises(StrategyError):
                coordinator.join()
            output.append(str(caught.value))
        return output

    module, variable = cluster.run(train, ParameterServerStrategy()).results[0]
    assert "Linear.weight was created inside `run` of ParameterServerStrategy" in module
    assert "Create all variables before the coordinator" in variable


def test_function_that_kills_every_worker_ends_the_run(cluster) -> None:
    def train(strategy):
        create_model(strategy)
        coordinator = ClusterCoordinator(strategy)
        coordinator.schedule(lambda: os.kill(os.getpid(), signal.SIGKILL))
        coordinator.join()

    with pytest.raises(dk.errors.RankDied, match=r"replaced 3 times"):
        cluster.run(train, ParameterServerStrategy())
    assert cluster.run(lambda: os.environ["RANK"]).results == ["0", "1", "2"]
