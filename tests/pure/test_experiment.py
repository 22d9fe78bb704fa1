"""Experiments without ranks: controls, results and plots."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import ipywidgets
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import distkit as dk
from distkit.events import Event, Op, State
from distkit.trace.trace import Trace
from distkit_experiments import results
from distkit_experiments.results import Record


def train(batch: int = 32, lr: float = 0.2, algorithm: str = "ring") -> None:
    """The function that these experiments run."""


# -- controls ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("abbreviation", "widget"),
    [
        ((8, 128), ipywidgets.IntSlider),
        ((8, 128, 8), ipywidgets.IntSlider),
        ((0.0, 1), ipywidgets.FloatSlider),
        (["ring", "gloo"], ipywidgets.Dropdown),
        ({"ring": 1, "gloo": 2}, ipywidgets.Dropdown),
        (range(8, 64, 8), ipywidgets.Dropdown),
        (True, ipywidgets.Checkbox),
        ("text", ipywidgets.Text),
    ],
)
def test_abbreviations_match_interact(abbreviation: Any, widget: type) -> None:
    assert type(controls(lambda x: None, x=abbreviation)["x"].widget) is widget


def controls(fn: Any, **given: Any) -> Any:
    return dk.Experiment(fn, **given).settings.controls


def setting(fn: Any, given: dict[str, Any], **changed: Any) -> dict[str, Any]:
    """Return a run's settings: the controls' values, except for those in ``changed``."""
    return dk.Experiment(fn, **given).settings.complete(**changed)


def test_control_starts_at_the_default() -> None:
    given = {"batch": (8, 128), "lr": (0.01, 1.0), "algorithm": ["gloo", "ring"]}
    assert setting(train, given) == {"ranks": 4, "batch": 32, "lr": 0.2, "algorithm": "ring"}


def test_sizes_and_learning_rates_are_logarithmic() -> None:
    def send(size: int = 1000, lr: float = 0.1) -> None: ...

    found = controls(send, size=(64, 4096), lr=(0.01, 1.0))
    assert found["size"].value == 1000
    labels = [label for label, _ in found["size"].widget.options]
    assert labels == ["64 B", "128 B", "256 B", "512 B", "1000 B", "1 KiB", "2 KiB", "4 KiB"]
    assert isinstance(found["lr"].widget, ipywidgets.FloatLogSlider)
    found["lr"].widget.value = 10**-0.7
    assert found["lr"].value == 0.2  # as displayed, not 0.19952623149688797


def test_times_are_in_milliseconds_and_steps_are_round() -> None:
    given = {"straggler": (0, 0.05), "latency": (1e-5, 0.02), "bandwidth": (1e6, 1e9)}
    experiment = dk.Experiment(train, **given)
    straggler, latency, bandwidth = (experiment.settings.controls[name] for name in given)
    assert (straggler.unit, straggler.widget.max, straggler.widget.step) == ("[ms]", 50, 1)
    assert (latency.unit, bandwidth.unit, bandwidth.widget.max) == ("[ms]", "[MB/s]", 3)
    straggler.widget.value, latency.widget.value, bandwidth.widget.value = 20, 5, 25
    assert experiment.settings.complete() == {
        "ranks": 4,
        "straggler": 0.02,
        "latency": 0.005,
        "bandwidth": 2.5e7,
    }
    seconds = controls(train, straggler=(0, 2))["straggler"]
    assert (seconds.unit, seconds.widget.max) == ("[s]", 2)


def test_ranks_and_straggler_are_reserved_parameters() -> None:
    given = {"ranks": (2, 8), "straggler": (0, 0.5)}
    assert setting(train, given) == {"ranks": 4, "straggler": 0}
    assert setting(train, given, ranks=2, straggler=0.1) == {"ranks": 2, "straggler": 0.1}
    assert setting(train, {"ranks": (5, 8)}) == {"ranks": 5}
    assert setting(train, {"ranks": [6, 2]}) == {"ranks": 6}
    assert setting(train, {"ranks": 3}) == {"ranks": 3}


def requires_x(x: int, y: int = 1) -> None:
    """Has a parameter without a default."""


INVALID_CONTROLS = [
    (train, {"speed": (1, 2)}, TypeError, r"has no parameter speed. Parameters: batch, lr"),
    (requires_x, {}, TypeError, r"needs x. Add a default value"),
    (requires_x, {"y": (0, 2)}, TypeError, "needs x"),
    (
        lambda ranks=2: None,
        {},
        TypeError,
        "has a parameter named ranks, which an experiment reserves",
    ),
    (lambda *args: None, {}, TypeError, "cannot be passed by name"),
    (42, {}, TypeError, "an experiment needs a function"),
    (train, {"ranks": 0}, ValueError, "ranks must be an integer of at least 1, not 0"),
    (train, {"ranks": (0, 4)}, ValueError, "ranks must be .*, not 0"),
    (train, {"ranks": [2, 2.5]}, ValueError, "ranks must be .*, not 2.5"),
    (train, {"ranks": (4, 2)}, ValueError, "a range needs a lower and an upper bound"),
    (train, {"straggler": (-1, 1)}, ValueError, "at least 0 seconds, not -1"),
    (train, {"batch": (64, 128)}, ValueError, "starts at the function's default, but batch=32"),
    (train, {"algorithm": ["gloo"]}, ValueError, "ring is not one of its choices: gloo"),
    (train, {"algorithm": []}, ValueError, "the list of choices is empty"),
    (train, {"batch": 32}, TypeError, "a range needs two different values"),
    (train, {"batch": (8, float("nan"))}, ValueError, "a range needs a lower and"),
    (train, {"batch": (8, 128, 0)}, ValueError, "any step must be above 0"),
    (train, {"lr": (0.0, 1.0)}, ValueError, "logarithmic scale, which must start above 0"),
    (train, {"batch": None}, TypeError, "is not a control"),
    (train, {"batch": ipywidgets.VBox()}, TypeError, "VBox widgets have no value"),
]


@pytest.mark.parametrize(("fn", "controls", "error", "message"), INVALID_CONTROLS)
def test_invalid_controls_raise_immediately(
    fn: Any, controls: Any, error: type, message: str
) -> None:
    with pytest.raises(error, match=message):
        dk.Experiment(fn, **controls)


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ({"batch": 256}, ValueError, "batch=256 is outside its range: integers from 8 to 128"),
        ({"batch": 8.5}, ValueError, "integers from"),
        ({"batch": True}, ValueError, "batch=True is outside"),
        ({"batch": "many"}, ValueError, "batch=many is outside"),
        ({"algorithm": "tree"}, ValueError, "not one of its choices: ring, gloo"),
        ({"ranks": 0}, ValueError, "ranks must be .*, not 0"),
        ({"straggler": float("nan")}, ValueError, "at least 0 seconds, not nan"),
        ({"size": 3}, TypeError, r"train\(\) has no parameter size"),
    ],
)
def test_values_outside_the_range_raise(values: Any, error: type, message: str) -> None:
    experiment = dk.Experiment(train, batch=(8, 128), algorithm=["ring", "gloo"])
    with pytest.raises(error, match=message):
        experiment.run(**values)
    with pytest.raises(error, match=message):
        experiment.sweep(**{name: [value] for name, value in values.items()})


@pytest.mark.parametrize("values", [{}, {"batch": []}])
def test_sweep_without_values_raises(values: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="sweep"):
        dk.Experiment(train).sweep(**values)


# -- results ------------------------------------------------------------------------


def make_record(seconds: float, result: Any = None, outcome: str = "", **parameters: Any) -> Record:
    """Return the record of a run that sent 8 bytes."""
    events = [
        Event(0, 0, Op.SEND, State.STARTED, 0.0, peer=1, nbytes=8),
        Event(1, 0, Op.RECV, State.COMPLETED, 0.1, peer=0, nbytes=8),
    ]
    error = dk.errors.RankError("rank 1 raised", rank=1) if outcome else None
    run: Any = SimpleNamespace(
        seconds=seconds, trace=Trace(events), error=error, findings=[], results=[result, None]
    )
    return results.record(parameters, run)


def test_record_has_measurements_and_results() -> None:
    import torch

    record = make_record(
        0.5, {"loss": torch.tensor(0.25), "seconds": 3, "name": "x", "ok": True}, batch=8
    )
    assert record.row == {
        "batch": 8,
        "seconds": 0.5,
        "waiting": 0.05,  # rank 1 waited for 0.1 s
        "messages": 1,
        "collectives": 0,
        "bytes": 8,
        "loss": 0.25,
        "seconds returned": 3,
        "outcome": "ok",
    }
    assert make_record(0.5, 7).values == {"result": 7}
    counted = results.record({}, record.run, steps=10)
    assert (counted.row["completed steps"], counted.row["seconds per step"]) == (10, 0.05)
    assert make_record(0.5, [1, 2]).values == {}
    assert make_record(0.5, 7, "RankError").row["outcome"] == "RankError"


def experiment_with(*records: Record, **given: Any) -> dk.Experiment:
    """Return an experiment that has these records."""
    experiment = dk.Experiment(train, **given)
    experiment.records += records
    return experiment


def test_table_of_several_runs_shows_differing_columns_and_common_values() -> None:
    records = [
        make_record(0.5, {"loss": 2.0}, ranks=2, batch=8),
        make_record(0.25, {"loss": 1.5}, ranks=2, batch=16),
        make_record(0.1, outcome="RankError", ranks=2, batch=32),
    ]
    assert repr(experiment_with(*records)) == (
        "Experiment with train: 3 runs, 1 failed or stopped\n"
        "  batch seconds loss    outcome\n"
        "3    32  100 ms       RankError\n"
        "2    16  250 ms  1.5         ok\n"
        "1     8  500 ms    2         ok\n"
        "all runs: ranks 2 · waiting 50 ms · messages 1 · bytes 8 B"
    )
    assert repr(experiment_with()) == "Experiment with train: no runs yet"
    assert repr(experiment_with(records[0])) == (
        "Experiment with train: 1 run\n"
        "  ranks batch seconds loss waiting messages bytes\n"
        "1     2     8  500 ms    2   50 ms        1   8 B"
    )


def test_user_text_is_escaped() -> None:
    experiment = experiment_with(
        make_record(0.5, {"<b>": 1}, kind="<i>&"), make_record(0.5, {"<b>": 2}, kind="b")
    )
    page = experiment._repr_mimebundle_()[0]["text/html"]
    assert "<i>" not in page and "&lt;i&gt;&amp;" in page and "&lt;b&gt;" in page
    ElementTree.fromstring(experiment.chart_svg())


def test_plot_uses_the_varied_parameter_as_x_axis() -> None:
    def against(*records: Record) -> str:
        return experiment_with(*records).plot("seconds").axes[0].get_xlabel()

    one, two = (
        make_record(1, batch=8, lr=0.1, how="ring"),
        make_record(2, batch=16, lr=0.1, how="ring"),
    )
    three, four = (
        make_record(3, batch=16, lr=0.2, how="ring"),
        make_record(4, batch=16, lr=0.2, how="gloo"),
    )
    assert against(one, two) == "batch"
    assert against(one, two, three, make_record(3, batch=16, lr=0.4, how="ring")) == "lr"
    assert against(one, two, three, four) == "batch"  # numbers before text
    assert against(three, four) == "how"
    with pytest.raises(ValueError, match="at least twice"):
        against(one)


SETTINGS = st.fixed_dictionaries(
    {
        "batch": st.sampled_from([1, 8, 64, 512]),
        "lr": st.sampled_from([-1.0, 0.0, 0.1, 1e9]),
        "how": st.sampled_from(["ring", "gloo", "a very long name " * 5, ""]),
    }
)


@settings(max_examples=5)  # each draws a figure
@given(st.lists(st.tuples(SETTINGS, st.floats(0, 1e4), st.booleans()), max_size=20))
@example([({"batch": 1, "lr": -1.0, "how": how}, 0.0, False) for how in ("ring", "long " * 20)])
def test_every_plot_is_well_formed_svg(drawn: Any) -> None:
    records = [
        make_record(seconds, outcome="RankError" if bad else "", **setting)
        for setting, seconds, bad in drawn
    ]
    experiment = experiment_with(*records)
    page, svg = experiment._repr_mimebundle_()[0]["text/html"], experiment.chart_svg()
    assert ("<img" in page) == bool(svg)
    succeeded = [r for r in records if not r.outcome]
    assert bool(svg) == (len({str(sorted(r.parameters.items())) for r in succeeded}) > 1)
    if svg:
        root = ElementTree.fromstring(svg)
        _, _, width, height = map(float, root.attrib["viewBox"].split())
        dots = [dot.attrib for dot in root.iter("{http://www.w3.org/2000/svg}use")]
        assert len(dots) >= len(succeeded)
        assert all(0 <= float(d["x"]) <= width and 0 <= float(d["y"]) <= height for d in dots)


def test_any_result_is_plotted_against_any_parameter() -> None:
    records = [
        make_record(b / 100, {"loss": b + lr, "took": lr}, batch=b, lr=lr, ranks=2)
        for b in (8, 16)
        for lr in (0.1, 0.2)
    ]
    experiment = experiment_with(*records)
    seconds, loss = experiment.plot().axes
    assert (seconds.get_title(loc="left"), loss.get_title(loc="left")) == ("seconds", "loss")
    (took,) = experiment.plot("took", against="lr").axes
    lines = [line for line in took.lines if line.get_linestyle() != "None"]
    assert [line.get_xydata().tolist() for line in lines] == [[[0.1, 0.1], [0.2, 0.2]]] * 2
    assert len({line.get_linestyle() for line in lines}) == 2  # both are visible
    assert took.get_xlabel() == "lr"
    assert [text.get_text() for text in took.figure.legends[0].texts] == ["batch=8", "batch=16"]
    (loss,) = experiment.plot("loss", against="took").axes  # a result against another
    dots = [line.get_xydata().tolist() for line in loss.lines if line.get_linestyle() == "None"]
    assert sorted(dot for line in dots for dot in line) == [
        [0.1, 8.1],
        [0.1, 16.1],
        [0.2, 8.2],
        [0.2, 16.2],
    ]
    with pytest.raises(ValueError, match=r"'speed' cannot be plotted. Available: seconds, loss, "):
        experiment.plot("speed")
    with pytest.raises(ValueError, match=r"'ranks' cannot be plotted\. Available: "):
        experiment.plot(against="ranks")


# -- the panel ----------------------------------------------------------------------


def test_notebook_displays_panel_html_and_text_and_a_closed_experiment_raises() -> None:
    experiment = dk.Experiment(train, batch=(8, 128), algorithm=["ring", "gloo"])
    data, _ = experiment._repr_mimebundle_()
    assert {"application/vnd.jupyter.widget-view+json", "text/html", "text/plain"} <= {*data}
    assert data["text/plain"] == "Experiment with train: no runs yet"
    experiment.close()
    with pytest.raises(dk.errors.StoppedError, match="the experiment was closed"):
        experiment.run()


def test_custom_plot_follows_controls_and_runs() -> None:
    from matplotlib.figure import Figure

    def picture(runs: Any, setting: dict[str, Any]) -> Figure:
        if setting["batch"] > 100:
            raise ValueError("<picture> is too large")
        figure = Figure()
        figure.suptitle(f"batch {setting['batch']} after {[*runs.index]}")
        return figure

    experiment = dk.Experiment(train, picture=picture, batch=(8, 128))
    drawn = experiment.panel._chart
    assert ">batch 32 after []</text>" in drawn.value
    experiment.settings.controls["batch"].widget.value = 64
    assert ">batch 64 after []</text>" in drawn.value
    experiment.records += [
        make_record(0.1, outcome="stopped", batch=16),
        make_record(0.1, batch=16),
    ]
    experiment.panel.refresh(experiment)
    assert ">batch 64 after [2]</text>" in drawn.value
    experiment.settings.controls["batch"].widget.value = 128
    assert "<b>ValueError</b> &lt;picture&gt; is too large" in drawn.value
    assert "2 runs" in repr(experiment)
    experiment.close()
    with pytest.raises(TypeError, match=r"a function that plots the runs, not \(1, 2\)"):
        dk.Experiment(train, picture=(1, 2))
