"""Strategies on ranks, compared with one process."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ports import reserved_port
from torch import Tensor, nn
from training import error_message, training_step

from distkit import run_ranks
from distkit.errors import RankError, StrategyError
from distkit_strategies import (
    CommunicationOptions,
    MirroredStrategy,
    MultiWorkerMirroredStrategy,
    OneDeviceStrategy,
    Strategy,
    TPUStrategy,
    Variable,
    get_replica_context,
    get_strategy,
)

X = torch.randn(30, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = (X.sum(1) > 0).long()


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).double()


def shards(strategy: Strategy, batch: int) -> list[tuple[Tensor, Tensor]]:
    """Return this replica's rows of each batch."""
    r, n = strategy._replica, strategy.num_replicas_in_sync
    return [(x[r::n], y[r::n]) for x, y in zip(X.split(batch), Y.split(batch), strict=True)]


def train(strategy: Strategy, make=torch.optim.SGD, batch: int = 11, **options):
    """Return the losses and weights from two epochs."""
    torch.manual_seed(dist.get_rank() if strategy.num_replicas_in_sync > 1 else 0)
    with strategy.scope():
        model = network()
        optimizer = make(model.parameters(), **{"lr": 0.1, **options})

    step = training_step(model, optimizer)
    losses = [
        strategy.reduce("mean", strategy.run(step, args=(x, y))).item()
        for x, y in shards(strategy, batch) * 2
    ]
    return losses, nn.utils.parameters_to_vector(model.parameters()).detach()


def check_equal_to_one_process(found, **options) -> None:
    losses, weights = train(Strategy(), **options)
    for replica_losses, replica_weights in found:
        torch.testing.assert_close(replica_losses, losses, rtol=0, atol=1e-12)
        torch.testing.assert_close(replica_weights, weights, rtol=0, atol=1e-12)
        assert torch.equal(replica_weights, found[0][1])


@pytest.mark.parametrize(
    ("kind", "ranks"), [(OneDeviceStrategy, 2), (MirroredStrategy, 1), (MirroredStrategy, 3)]
)
def test_strategy_equals_one_process(kind: type[Strategy], ranks: int) -> None:
    """30 rows in batches of 11: the shards differ in size, and the last batch is shorter."""
    check_equal_to_one_process(run_ranks(train, ranks, kind()).results)


@pytest.mark.parametrize("name", ["HierarchicalCopyAllReduce", "auto"])
def test_every_cross_device_op_computes_the_same_sum(name: str) -> None:
    check_equal_to_one_process(run_ranks(train, 3, MirroredStrategy(cross_device_ops=name)).results)


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.01, "nesterov": True}),
        (torch.optim.AdamW, {"lr": 0.01}),
    ],
)
def test_every_optimizer_takes_the_same_steps(make, options) -> None:
    options = {"make": make, **options}
    check_equal_to_one_process(
        run_ranks(train, 2, MirroredStrategy(), **options).results, **options
    )


def test_batch_with_fewer_rows_than_replicas_counts_only_its_rows() -> None:
    check_equal_to_one_process(run_ranks(train, 3, MirroredStrategy(), batch=2).results, batch=2)


def test_training_step_uses_two_all_reduces_and_two_all_gathers() -> None:
    ops = [s.op for s in run_ranks(train, 2, MirroredStrategy()).trace.spans if s.rank == 0]
    steps = 6
    assert ops.count("all_reduce") == 2 * steps  # gradients, and the loss
    assert ops.count("all_gather") == 2 * steps + 1
    assert ops.count("broadcast") == 4  # two layers


# -- contexts ------------------------------------------------------------------------------------


def test_context_depends_on_the_calling_code() -> None:
    strategy = MirroredStrategy()
    assert get_strategy().num_replicas_in_sync == 1
    with strategy.scope():
        assert get_strategy() is strategy
        assert get_replica_context() is None

    def who() -> int:
        assert get_strategy() is strategy
        return get_replica_context().replica_id_in_sync_group

    assert strategy.run(who) == 0
    assert get_replica_context() is not None


# -- reduce and gather ---------------------------------------------------------------------------


def test_reduce_and_gather_return_equal_values_on_all_replicas() -> None:
    def values(strategy: Strategy):
        r = dist.get_rank()
        rows = torch.arange(r + 1.0, dtype=torch.float64)
        return (
            strategy.reduce("sum", {"n": torch.tensor(r)})["n"].item(),
            strategy.reduce("MEAN", r).item(),
            strategy.reduce("mean", rows, axis=0).item(),
            strategy.gather(rows).tolist(),
            strategy.gather(torch.full((1, r + 1), r), axis=1).tolist(),
            strategy.local_results(r),
        )

    for r, found in enumerate(run_ranks(values, 3, MirroredStrategy()).results):
        rows = [0.0, 0.0, 1.0, 0.0, 1.0, 2.0]
        assert found == (3, 1.0, sum(rows) / 6, rows, [[0, 1, 1, 2, 2, 2]], (r,))


def test_mean_of_results_weights_each_row_once() -> None:
    def values(strategy: Strategy):
        data = torch.tensor([0, 1, 3, 4, 8], dtype=torch.float64)
        (x,) = strategy.distribute_dataset(data, global_batch=5)
        loss, both, number = strategy.run(
            lambda x: (x.mean(), torch.stack([x.mean(), x.max()]), x.mean().item()), args=(x,)
        )
        means = [strategy.reduce("mean", v).tolist() for v in (loss, both, number)]
        return x.tolist(), means, strategy.reduce("mean", loss + 1).item()

    (mine, means, later), (others, same, _) = run_ranks(values, 2, MirroredStrategy()).results
    assert (mine, others) == ([0, 3, 8], [1, 4]) and means == same
    mean, most = 16 / 5, (3 * 8 + 2 * 4) / 5
    assert means == [pytest.approx(mean), pytest.approx([mean, most]), pytest.approx(mean)]
    assert later == pytest.approx((11 / 3 + 5 / 2) / 2 + 1)  # each replica has the same weight


def test_sums_and_means_do_not_overflow() -> None:
    def values(strategy: Strategy):
        half = torch.tensor(40000.0, dtype=torch.float16)
        loss = strategy.run(lambda x: half, args=(torch.zeros(3 + dist.get_rank()),))
        inside = strategy.run(lambda: get_replica_context().all_reduce("mean", half))
        return (
            strategy.reduce("mean", loss).item(),
            inside.item(),
            strategy.reduce("mean", half.expand(2), axis=0).item(),
            strategy.reduce("sum", torch.tensor(200, dtype=torch.uint8)).item(),
            strategy.reduce("sum", torch.tensor([True, False])).tolist(),
            strategy.reduce("mean", torch.tensor(2**53 - 1)).item(),
        )

    expected = (40000.0, 40000.0, 40000.0, 400, [2, 0], 2**53 - 1)
    assert run_ranks(values, 2, MirroredStrategy()).results == [expected] * 2


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda s: s.reduce("mean", None),
            r"reduce .*; got None .NoneType..*returns its result\.",
        ),
        (lambda s: s.gather("abc"), "gather .*; got 'abc' .str"),
        (
            lambda s: s.run(lambda: get_replica_context().all_gather("a")),
            "all_gather .*; got 'a' .str",
        ),
        (
            lambda s: s.reduce("mean", 1.0, axis=0),
            "reduce along dimension 0: the value of .* no such",
        ),
        (lambda s: Variable(None), "Variable .*; got None .NoneType"),
        (lambda s: Variable(1.0).assign("a"), "assign .*; got 'a' .str"),
        (lambda s: s.distribute_dataset(X), "integer global_batch.*; got None"),
        (lambda s: s.distribute_dataset(X, "8"), "integer global_batch.*; got '8'"),
        (lambda s: s.distribute_dataset(X, 2.5), "integer global_batch.*; got 2.5"),
        (
            lambda s: s.distribute_dataset(X, 8, drop_remainder=True),
            "no argument drop_remainder; it accepts global_batch, policy, shuffle, seed",
        ),
    ],
)
def test_invalid_argument_raises(call, message: str) -> None:
    with pytest.raises(StrategyError, match=message):
        call(Strategy())


def test_one_batch_is_prefetched() -> None:
    read = []

    def batches(_) -> Iterator[Tensor]:
        for n in range(6):
            read.append(n)
            yield torch.tensor(n)

    dataset = iter(Strategy().distribute_datasets_from_function(batches))
    assert next(dataset) == 0 and read == [0, 1]
    assert [int(n) for n in dataset] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((2, 3), "replica 0 has (2, 2) and replica 1 has (2, 3), which differ in dimension 1"),
        ((2,), "replica 1 has (2,), which differ in the number of dimensions"),
    ],
)
def test_unequal_shapes_raise_on_all_replicas(shape, message: str) -> None:
    def gather(strategy: Strategy):
        try:
            strategy.gather(torch.zeros((2, 2) if dist.get_rank() == 0 else shape))
        except StrategyError as error:
            return str(error), strategy.reduce("sum", 1).item()

    for error, after in run_ranks(gather, 2, MirroredStrategy()).results:
        assert message in error
        assert after == 2


# -- errors on all replicas ----------------------------------------------------------------------


def different_calls(strategy: Strategy) -> None:
    (strategy.reduce if dist.get_rank() else lambda _, x: strategy.gather(x))("sum", X)


def different_models(strategy: Strategy) -> None:
    with strategy.scope():
        nn.Linear(2, 1 + dist.get_rank())


def variables_outside_the_scope(strategy: Strategy) -> None:
    strategy.run(torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1).step)


def step_outside_run(strategy: Strategy) -> None:
    with strategy.scope():
        optimizer = torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1)
    optimizer.step()


def another_device(strategy: Strategy) -> None:
    with strategy.scope():
        nn.Linear(2, 1, device="meta")


def lazy_layer(strategy: Strategy) -> None:
    with strategy.scope():
        nn.LazyLinear(1)


MISTAKES = {
    different_calls: "replica 0 is in gather, replica 1 is in reduce",
    different_models: "differ in number, name, shape or dtype: replica 0 created 2",
    variables_outside_the_scope: "parameter 0, of shape (1, 2), which was created outside",
    step_outside_run: "SGD.step() was called outside `run`: it updates Linear.weight",
    another_device: "Linear.weight is on meta",
    lazy_layer: "LazyLinear.weight has no shape yet",
}


def test_mistakes_raise_the_same_error_on_all_ranks() -> None:
    def errors() -> list[str]:
        return [error_message(StrategyError, fn, MirroredStrategy()) for fn in MISTAKES]

    first, second = run_ranks(errors, 2).results
    assert first == second
    for text, message in zip(first, MISTAKES.values(), strict=True):
        assert message in text


def test_error_names_the_users_line() -> None:
    def divide(strategy: Strategy) -> None:
        strategy.distribute_dataset(X, global_batch=1)

    with pytest.raises(RankError, match="cannot be divided among 2 replicas") as caught:
        run_ranks(divide, 2, MirroredStrategy())
    assert Path(caught.value.line.rpartition(":")[0]).name == Path(__file__).name


def test_strategies_do_not_nest() -> None:
    outer, inner = MirroredStrategy(), MirroredStrategy()
    with outer.scope():
        with pytest.raises(StrategyError, match="cannot be nested"), inner.scope():
            pass
        with outer.scope():
            pass
        with pytest.raises(StrategyError, match="cannot be nested"):
            inner.run(print)
    with pytest.raises(StrategyError, match="inside a replica function"):
        outer.run(lambda: outer.run(print))
    with pytest.raises(StrategyError, match="inside a replica function"):
        outer.run(lambda: outer.reduce("sum", 1))
    assert get_replica_context() is not None


def test_ranks_that_share_a_device_warn() -> None:
    def warned(strategy: Strategy) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with strategy.scope():
                nn.Linear(1, 1)
        return [str(w.message) for w in caught]

    (message,), *others = run_ranks(warned, 3, MirroredStrategy(["cpu", "cpu:0"])).results
    assert "There are 3 replicas" in message and "uses device r mod 2 of cpu, cpu" in message
    assert others == [[], []]


def test_missing_devices_are_skipped_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="are skipped: cuda:7"):
        MirroredStrategy(["cpu", "cuda:7"])


@pytest.mark.parametrize(
    ("create", "error", "message"),
    [
        (
            lambda: MirroredStrategy(["cuda:7"]),
            StrategyError,
            r"does not have the requested devices: cuda:7",
        ),
        (lambda: OneDeviceStrategy("cuda:7"), StrategyError, "Device cuda:7 does not exist"),
        (lambda: MirroredStrategy(cross_device_ops="unknown"), ValueError, "unknown all-reduce"),
        (TPUStrategy, StrategyError, "needs torch_xla, which is not installed"),
        (
            lambda: CommunicationOptions(bytes_per_pack=-1),
            ValueError,
            "bytes_per_pack of at least 0; got -1",
        ),
    ],
)
def test_missing_hardware_and_invalid_options_raise(
    create, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        create()


def test_experimental_names_are_accepted_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="is called local_results"):
        assert Strategy().experimental_local_results(1) == (1,)


# -- several workers -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        CommunicationOptions(implementation="RING", bytes_per_pack=100),
        CommunicationOptions(),
    ],
    ids=str,
)
def test_multi_worker_strategy_equals_one_process(options: CommunicationOptions) -> None:
    run = run_ranks(train, 2, MultiWorkerMirroredStrategy(options))
    check_equal_to_one_process(run.results)
    sent = [m for m in run.trace.messages if m.src == 0]
    # six steps, each with 74 gradient elements of 8 bytes, 12 per pack; in a ring of two, rank 0
    # sends half of each pack twice
    packs = -(-74 // 12)
    assert len(sent) == (6 * packs * 2 if options.implementation == "RING" else 0)


def test_script_uses_tf_config(monkeypatch: pytest.MonkeyPatch) -> None:
    def script(first: int, second: int) -> tuple[int, int]:
        rank = dist.get_rank()
        dist.destroy_process_group()
        cluster = {"chief": [f"localhost:{first}"], "worker": [f"localhost:{second}"]}
        task = {"type": "worker" if rank else "chief", "index": 0}
        os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": task})
        strategy = MultiWorkerMirroredStrategy()
        return strategy.num_replicas_in_sync, strategy.reduce("sum", rank + 1).item()

    with reserved_port() as first, reserved_port() as second:
        assert run_ranks(script, 2, first, second).results == [(2, 3), (2, 3)]
    monkeypatch.setenv("TF_CONFIG", '{"cluster": {"worker": ["a:1"]}, "task":')
    with pytest.raises(StrategyError, match="TF_CONFIG is not valid JSON"):
        MultiWorkerMirroredStrategy()
    evaluator = '{"cluster": {"worker": ["a:1"]}, "task": {"type": "evaluator", "index": 0}}'
    monkeypatch.setenv("TF_CONFIG", evaluator)
    with pytest.raises(StrategyError, match="evaluator 0, which does not train"):
        MultiWorkerMirroredStrategy()


def test_nccl_without_nccl_ranks_raises() -> None:
    def nccl() -> str:
        strategy = MultiWorkerMirroredStrategy(CommunicationOptions(implementation="NCCL"))
        return error_message(StrategyError, strategy._all_reduce_gradients, torch.ones(1))

    assert "requests NCCL, but these ranks use" in run_ranks(nccl, 2).results[0]
