"""fit, evaluate and predict under strategies, with callbacks and checkpoints."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from distkit import data, run_ranks
from distkit.errors import StrategyError
from distkit_strategies import (
    Callback,
    Checkpoint,
    EarlyStopping,
    LearningRate,
    MirroredStrategy,
    Model,
    Strategy,
    TensorBoard,
    load_weights,
    save_weights,
    support,
)

TRAINED, HELD_OUT = slice(0, 1400), slice(1400, None)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread, as on ranks; several threads are slow on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).double()


def classifier(strategy: Strategy, lr: float = 0.2) -> Model:
    with strategy.scope():
        module = network()
        return Model(module, torch.optim.SGD(module.parameters(), lr, momentum=0.9))


def digits(rows: slice) -> tuple[Tensor, Tensor]:
    images, labels = data.digits()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    return images[order][rows].double(), labels[order][rows]


def fit_model(strategy: Strategy, epochs: int):
    model = classifier(strategy)
    history = model.fit(
        digits(TRAINED),
        global_batch=100,
        epochs=epochs,
        validation_data=digits(HELD_OUT),
        verbose=False,
    )
    return history, model.predict(digits(HELD_OUT)[0], global_batch=64)


def test_fit_equals_one_process() -> None:
    history, outputs = fit_model(Strategy(), 13)
    assert history["val_accuracy"][-1] >= 0.97
    for found, predicted in run_ranks(fit_model, 3, MirroredStrategy(), 13).results:
        for name, values in history.items():
            assert found[name] == pytest.approx(values, rel=0, abs=1e-12), name
        assert found["val_accuracy"] == history["val_accuracy"]
        torch.testing.assert_close(predicted, outputs, rtol=0, atol=1e-12)


def test_evaluation_counts_every_row_once() -> None:
    """Some ranks may have no rows."""

    def evaluate(strategy: Strategy, rows: int):
        images, labels = digits(HELD_OUT)
        with strategy.scope():
            model = Model(network())
        return model.evaluate((images[:rows], labels[:rows]), global_batch=5)

    for rows, ranks in ((397, 2), (11, 5)):
        expected = evaluate(Strategy(), rows)
        for found in run_ranks(evaluate, ranks, MirroredStrategy(), rows).results:
            assert found["accuracy"] == expected["accuracy"]
            assert found["loss"] == pytest.approx(expected["loss"], rel=0, abs=1e-12)


def test_only_the_chief_prints(capsys: pytest.CaptureFixture) -> None:
    def fit(strategy: Strategy) -> None:
        classifier(strategy).fit(digits(slice(20)), global_batch=10)

    run_ranks(fit, 2, MirroredStrategy())
    output = capsys.readouterr().out
    assert output.count("epoch 1/1  loss ") == 1
    assert "[rank 0]" in output


def test_callbacks_are_called_and_stop_training() -> None:
    calls: list[str] = []

    class RecordingCallback(Callback):
        def on_batch_end(self, step: int) -> None:
            calls.append(f"batch {step}")

        def on_train_end(self) -> None:
            calls.append(f"rate {self.model.optimizer.param_groups[0]['lr']}")

    model = classifier(Strategy())
    callbacks = [
        RecordingCallback(),
        LearningRate(lambda epoch, _: 0.0 if epoch else 0.1),
        EarlyStopping(),
    ]
    history = model.fit(
        digits(slice(20)), global_batch=10, epochs=9, callbacks=callbacks, verbose=False
    )
    assert len(history["loss"]) == 3  # the learning rate is 0 after the first epoch
    assert calls == ["batch 0", "batch 1"] * 3 + ["rate 0.0"]
    with pytest.raises(StrategyError, match=r"cannot monitor 'val_loss'.*loss, accuracy"):
        model.fit(digits(slice(5)), epochs=99, callbacks=[EarlyStopping("val_loss")])
    with pytest.raises(ValueError, match='mode "min" or "max"; got'):
        EarlyStopping(mode="auto")


def test_training_resumes_on_another_number_of_ranks(tmp_path: Path) -> None:
    def train(strategy: Strategy, epochs: int, folder: Path):
        model = classifier(strategy)
        history = model.fit(
            digits(slice(60)),
            global_batch=20,
            epochs=epochs,
            callbacks=[Checkpoint(folder)],
            verbose=False,
        )
        return history, nn.utils.parameters_to_vector(model.module.parameters()).detach()

    expected, weights = train(Strategy(), 3, tmp_path / "one")
    run_ranks(train, 3, MirroredStrategy(), 1, tmp_path / "parts")
    run_ranks(train, 2, MirroredStrategy(), 2, tmp_path / "parts")
    history, found = train(Strategy(), 3, tmp_path / "parts")
    assert history["loss"] == pytest.approx(expected["loss"][2:], rel=0, abs=1e-12)
    torch.testing.assert_close(found, weights, rtol=0, atol=1e-12)


def test_incompatible_checkpoints_raise(tmp_path: Path) -> None:
    model = classifier(Strategy())
    with pytest.raises(StrategyError, match="There is no checkpoint in"):
        model.load(tmp_path)
    model.save(tmp_path)
    with pytest.raises(StrategyError, match="belongs to a different model"):
        Model(nn.Linear(2, 2)).load(tmp_path)


def test_weights_are_saved_as_safetensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("safetensors")

    def save(strategy: Strategy, path: Path):
        with strategy.scope():
            module = nn.BatchNorm1d(2)
        strategy.run(module, args=(torch.full((2, 2), dist.get_rank() + 1.0),))
        save_weights(strategy, path, module)

    path = tmp_path / "weights.safetensors"
    run_ranks(save, 2, MirroredStrategy(), path)
    module = nn.BatchNorm1d(2)
    load_weights(path, module)
    assert module.running_mean.tolist() == pytest.approx([0.15, 0.15])
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(StrategyError, match="pip install safetensors"):
        load_weights(path, module)


def test_only_the_chief_writes_summaries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[object] = []

    class SummaryWriter:
        def __init__(self, folder: str) -> None:
            written.append(folder)

        def add_scalar(self, name: str, value: float, epoch: int) -> None:
            written.append((name, epoch))

        def close(self) -> None:
            written.append("closed")

    model = classifier(Strategy())
    fit = {"data": digits(slice(4)), "callbacks": [TensorBoard(tmp_path)], "verbose": False}
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(StrategyError, match="pip install tensorboard"):
        model.fit(**fit)
    fake = types.SimpleNamespace(SummaryWriter=SummaryWriter)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", fake)
    model.fit(**fit)
    assert written == [str(tmp_path), ("loss", 0), ("accuracy", 0), "closed"]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"loss": partial(F.cross_entropy, reduction="none")},
            StrategyError,
            r"shape \(4,\), but must be the mean",
        ),
        (
            {"metrics": {"error": F.cross_entropy}},
            ValueError,
            r"returned shape \(\) for 4 samples",
        ),
        (
            {"metrics": {"error": lambda outputs, y: outputs[:, :1] - y}},
            ValueError,
            r"returned shape \(4, 4\) for 4 samples",
        ),
    ],
)
def test_wrong_loss_reduction_raises(options, error: type[Exception], message: str) -> None:
    model = Model(network(), **options)
    with pytest.raises(error, match=message):
        model.evaluate(digits(slice(4)))


def test_model_without_an_optimizer_raises() -> None:
    model = Model(nn.Linear(64, 10).double())
    with pytest.raises(StrategyError, match="no optimizer"):
        model.fit(digits(slice(4)))
    assert model.predict(digits(slice(4))[0]).shape == (4, 10)


def test_support_table_is_measured() -> None:
    names = ["MirroredStrategy", "ParameterServerStrategy, sync", "TPUStrategy"]
    table = support(lambda do, strategies: run_ranks(do, 3, strategies), names).T
    assert set(table["MirroredStrategy"]) == {"equal to one process"}
    for text in table["ParameterServerStrategy, sync"]:
        assert text.startswith("not supported: ParameterServerStrategy needs parameter servers")
    assert table["TPUStrategy"]["fit"].startswith("not supported: TPUStrategy needs torch_xla")
