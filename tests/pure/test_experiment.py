"""Experiments without ranks: what controls allow, what runs add up to, what is drawn of them."""

from __future__ import annotations

import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import ipywidgets
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import distkit as dk
from distkit.events import Event, Op, State
from distkit.recording import recorder
from distkit.recording.progress import MARKS, Meter, noted, progress
from distkit.recording.recorder import Recorder, to_event
from distkit.trace.trace import Trace
from distkit_experiments import chart, results
from distkit_experiments.controls import Settings, make
from distkit_experiments.panel import Chart, Press, fitting, message
from distkit_experiments.results import Activity, Record, words


def train(batch: int = 32, lr: float = 0.2, algorithm: str = "ring") -> None:
    """What the controls of these tests are for."""


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
        ("words", ipywidgets.Text),
    ],
)
def test_abbreviations_are_those_of_interact(abbreviation: Any, widget: type) -> None:
    assert type(make("x", abbreviation).widget) is widget


def test_a_widget_stays_as_it_is() -> None:
    mine = ipywidgets.ToggleButtons(options=["ring", "gloo"], value="gloo")
    control = Settings(train, {"algorithm": mine}).controls["algorithm"]
    assert (control.widget, control.value, control.choices) == (mine, "gloo", ("ring", "gloo"))
    log = make("lr", ipywidgets.FloatLogSlider(value=0.1, min=-2, max=0))
    assert (log.low, log.high) == (0.01, 1)
    log.check(0.5)
    with pytest.raises(ValueError, match="outside"):
        log.check(2)


def test_a_control_begins_at_the_default() -> None:
    given = {"batch": (8, 128), "lr": (0.01, 1.0), "algorithm": ["gloo", "ring"]}
    settings = Settings(train, given)
    assert settings.complete() == {"ranks": 4, "batch": 32, "lr": 0.2, "algorithm": "ring"}


def test_sizes_and_learning_rates_are_logarithmic() -> None:
    def send(size: int = 1000, lr: float = 0.1) -> None: ...

    controls = Settings(send, {"size": (64, 4096), "lr": (0.01, 1.0)}).controls
    assert controls["size"].value == 1000
    labels = [label for label, _ in controls["size"].widget.options]
    assert labels == ["64 B", "128 B", "256 B", "512 B", "1000 B", "1 KiB", "2 KiB", "4 KiB"]
    assert isinstance(controls["lr"].widget, ipywidgets.FloatLogSlider)
    controls["lr"].widget.value = 10**-0.7
    assert controls["lr"].value == 0.2  # as the readout says, not 0.19952623149688797


@given(st.integers(1, 1 << 40), st.integers(1, 1 << 40))
def test_every_size_offered_is_inside(a: int, b: int) -> None:
    low, high = sorted((a, b + a))
    control = make("size", (low, high))
    values = [value for _, value in control.widget.options]
    assert values == sorted(set(values))
    assert (values[0], values[-1]) == (low, high)
    for value in values:
        control.check(value)


def test_times_are_in_milliseconds_and_steps_are_round() -> None:
    given = {"straggler": (0, 0.05), "latency": (1e-5, 0.02), "bandwidth": (1e6, 1e9)}
    settings = Settings(train, given, ranks=3)
    straggler, latency, bandwidth = (settings.controls[name] for name in given)
    assert (straggler.unit, straggler.widget.max, straggler.widget.step) == ("[ms]", 50, 1)
    assert (latency.unit, bandwidth.unit, bandwidth.widget.max) == ("[ms]", "[MB/s]", 3)
    straggler.widget.value, bandwidth.widget.value = 20, 25
    assert settings.complete()["straggler"] == 0.02
    assert settings.complete()["bandwidth"] == 2.5e7
    latency.start_at(0.005)
    assert latency.widget.value == 5 and settings.complete()["latency"] == 0.005
    seconds = Settings(train, {"straggler": (0, 2)}).controls["straggler"]
    assert (seconds.unit, seconds.widget.max) == ("[s]", 2)


def test_ranks_and_straggler_are_the_experiments_own() -> None:
    settings = Settings(train, {"ranks": (2, 8), "straggler": (0, 0.5)}, ranks=3)
    assert settings.complete() == {"ranks": 3, "straggler": 0}
    assert settings.complete(ranks=2, straggler=0.1) == {"ranks": 2, "straggler": 0.1}
    assert Settings(train, {"ranks": (5, 8)}).complete()["ranks"] == 5
    assert Settings(train, {"ranks": [6, 2]}).complete()["ranks"] == 6
    assert Settings(train, {"ranks": 3}).complete() == {"ranks": 3}


def needy(x: int, y: int = 1) -> None:
    """Needs x."""


def ranked(ranks: int = 2) -> None:
    """Wants what the experiment sets."""


BAD = [
    (train, {"speed": (1, 2)}, TypeError, r"has no parameter speed. Parameters: batch, lr"),
    (needy, {}, TypeError, r"needs x: give a default, or a control"),
    (needy, {"y": (0, 2)}, TypeError, "needs x"),
    (ranked, {}, TypeError, "has a parameter ranks, which an experiment sets itself"),
    (lambda *args: None, {}, TypeError, "has no name to set it by"),
    (42, {}, TypeError, "an experiment needs a function"),
    (train, {"ranks": 0}, ValueError, "ranks=0: must be a whole number, at least 1"),
    (train, {"ranks": (0, 4)}, ValueError, "ranks=0: must be"),
    (train, {"ranks": [2, 2.5]}, ValueError, "ranks=2.5: must be"),
    (train, {"ranks": (4, 2)}, ValueError, "from a smaller number to a greater"),
    (train, {"straggler": (-1, 1)}, ValueError, "straggler=-1: must be seconds"),
    (train, {"batch": (64, 128)}, ValueError, "begins at the function's default, and batch=32"),
    (train, {"algorithm": ["gloo"]}, ValueError, "ring is not one of its choices: gloo"),
    (train, {"algorithm": []}, ValueError, "the list of choices is empty"),
    (train, {"batch": 32}, TypeError, "a range needs two different values"),
    (train, {"batch": (8, float("nan"))}, ValueError, "a range has two numbers"),
    (train, {"batch": (8, 128, 0)}, ValueError, "step must be more than 0"),
    (train, {"lr": (0.0, 1.0)}, ValueError, "logarithmic scale, which begins above 0"),
    (train, {"batch": None}, TypeError, "cannot become a control"),
    (train, {"batch": ipywidgets.VBox()}, TypeError, "a VBox has no value"),
]


@pytest.mark.parametrize(("fn", "controls", "error", "said"), BAD)
def test_bad_controls_are_told_at_once(fn: Any, controls: Any, error: type, said: str) -> None:
    with pytest.raises(error, match=said):
        dk.Experiment(fn, **controls)


def test_a_function_that_cannot_travel_is_told_at_once() -> None:
    lock = threading.Lock()

    def locked() -> None:
        lock.acquire()

    with pytest.raises(dk.NotPicklableError, match="the captured variable 'lock'"):
        dk.Experiment(locked)
    with pytest.raises(TypeError, match=r"the second argument is a dk\.Cluster, not 4"):
        dk.Experiment(train, 4)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "error", "said"),
    [
        ({"batch": 256}, ValueError, "batch=256 is outside its control: whole numbers 8 to 128"),
        ({"batch": 8.5}, ValueError, "whole numbers"),
        ({"batch": True}, ValueError, "batch=True is outside"),
        ({"batch": "many"}, ValueError, "batch=many is outside"),
        ({"algorithm": "tree"}, ValueError, "not one of its choices: ring, gloo"),
        ({"ranks": 0}, ValueError, "ranks=0: must be"),
        ({"straggler": float("nan")}, ValueError, "straggler=nan: must be"),
        ({"size": 3}, TypeError, r"train\(\) has no parameter size"),
    ],
)
def test_values_outside_are_refused(values: Any, error: type, said: str) -> None:
    settings = Settings(train, {"batch": (8, 128), "algorithm": ["ring", "gloo"]})
    with pytest.raises(error, match=said):
        settings.complete(**values)
    with pytest.raises(error, match=said):
        settings.product(**{name: [value] for name, value in values.items()})


def test_a_sweep_is_every_combination() -> None:
    settings = Settings(train, {"batch": (8, 128)})
    found = settings.product(batch=[8, 16], lr=(0.1, 0.2), algorithm="gloo")
    assert [(s["batch"], s["lr"], s["algorithm"]) for s in found] == [
        (8, 0.1, "gloo"),
        (8, 0.2, "gloo"),
        (16, 0.1, "gloo"),
        (16, 0.2, "gloo"),
    ]
    for values in ({}, {"batch": []}):
        with pytest.raises((TypeError, ValueError), match="sweep"):
            settings.product(**values)


# -- progress -----------------------------------------------------------------------


@given(st.integers(1, 5000))
def test_a_loop_leaves_few_marks_and_always_the_last(total: int) -> None:
    told = [n for n in range(1, total + 1) if noted(n, total)]
    assert told[0] == 1 and told[-1] == total
    assert min(total, MARKS) <= len(told) <= MARKS + 1


@given(st.integers(1, 300), st.integers(1, 4), st.randoms())
def test_the_meter_tells_the_slowest_rank(total: int, ranks: int, random: Any) -> None:
    loops = [_marks(rank, total, random.randint(1, total)) for rank in range(ranks)]
    meter, last = Meter(), 0
    for events in zip(*(_padded(loop, 2 * total + 2) for loop in loops), strict=True):
        meter.feed(e for e in events if e is not None)
        assert meter.total == total
        assert 0 <= (meter.done or 0) <= total
        last = meter.done or 0
    slowest = [max(int(e.label[5:].split("/")[0]) for e in loop) for loop in loops]
    assert last == min(slowest)


def _marks(rank: int, total: int, steps: int) -> list[Event]:
    rec = Recorder(rank)
    recorder.set_current(rec)
    try:
        for n, _ in enumerate(progress(range(total)), 1):
            if n == steps:
                break
    finally:
        recorder.set_current(None)
    return [to_event(rank, row) for row in rec.drain()]


def _padded(events: list[Event], length: int) -> list[Event | None]:
    return [*events, *[None] * (length - len(events))]


def test_progress_is_read_from_other_marks_too() -> None:
    def step(rank: int, label: str = "", op: Op = Op.MARK, **facts: int) -> Event:
        return Event(rank, 0, op, State.COMPLETED, 0.0, attributes=facts or {"label": label})

    meter = Meter()
    assert (meter.done, meter.total, meter.operations) == (None, None, 0)
    meter.feed(
        [
            step(0, "step"),
            step(1, "step"),
            step(0, "step"),
            step(0, "forward"),
            step(0, "steps of mine"),
            step(0, "", Op.ALL_REDUCE),
        ]
    )
    assert (meter.done, meter.total, meter.operations) == (1, None, 1)
    meter.feed([step(0, step=4, steps=9), step(1, step=3, steps=9), step(1, "step")])
    assert (meter.done, meter.total) == (3, 9)  # a loop that counts itself is believed
    assert list(progress(iter("abc"))) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("activity", "said"),
    [
        (Activity(1), "starting 1 rank"),
        (Activity(4, 2, 6), "run 2 of 6 · starting 4 ranks"),
        (Activity(4, running=True), "0 operations"),
        (Activity(4, running=True, done=1200), "step 1,200"),
        (Activity(4, running=True, done=3, total=20, operations=7), "step 3 of 20"),
        (Activity(4, running=True, done=3, stopping=True), "stopping"),
        (Activity(4, running=True, over=True, stopping=True), "reading the trace"),
    ],
)
def test_what_it_does_in_words(activity: Activity, said: str) -> None:
    assert words(activity) == said


# -- results ------------------------------------------------------------------------


def done(seconds: float, result: Any = None, outcome: str = "", **parameters: Any) -> Record:
    """The record of a run that sent 8 bytes."""
    events = [
        Event(0, 0, Op.SEND, State.STARTED, 0.0, peer=1, nbytes=8),
        Event(1, 0, Op.RECV, State.COMPLETED, 0.1, peer=0, nbytes=8),
    ]
    error = dk.RankError("rank 1 raised", rank=1) if outcome else None
    run: Any = SimpleNamespace(
        seconds=seconds, trace=Trace(events), error=error, findings=[], results=[result, None]
    )
    return results.record(parameters, run)


def test_a_record_has_what_was_measured_and_returned() -> None:
    import torch

    made = done(0.5, {"loss": torch.tensor(0.25), "seconds": 3, "name": "x", "ok": True}, batch=8)
    assert made.row == {
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
    assert done(0.5, 7).values == {"result": 7}
    counted = results.record({}, made.run, steps=10)
    assert (counted.row["steps made"], counted.row["seconds a step"]) == (10, 0.05)
    assert done(0.5, [1, 2]).values == {}
    assert done(0.5, 7, "RankError").row["outcome"] == "RankError"


def test_the_table() -> None:
    some = [
        done(0.5, {"loss": 2.0}, ranks=2, batch=8),
        done(0.25, {"loss": 1.5}, ranks=2, batch=16),
        done(0.1, outcome="RankError", ranks=2, batch=32),
    ]
    assert results.to_text("train", some) == (
        "Experiment with train: 3 runs, 1 not to the end, 250 ms to 500 ms "
        "(ranks=2, messages=1, bytes=8 B)\n"
        "  #  batch  seconds  loss  waiting  outcome\n"
        "  3  32     100 ms         50 ms    RankError\n"
        "  2  16     250 ms   1.5   50 ms    ok\n"
        "  1  8      500 ms   2     50 ms    ok"
    )
    assert results.to_text("train", []) == "Experiment with train: no run yet"
    assert results.to_text("train", some[:1]) == (
        "Experiment with train: 1 run (messages=1, bytes=8 B)\n"
        "  #  ranks  batch  seconds  loss  waiting\n"
        "  1  2      8      500 ms   2     50 ms"
    )


def test_words_of_the_user_are_no_markup() -> None:
    some = [done(0.5, {"<b>": 1}, kind="<i>&"), done(0.5, {"<b>": 1}, kind="b")]
    page = results.to_html(some)
    assert "<i>" not in page and "&lt;i&gt;&amp;" in page and "&lt;b&gt;" in page
    assert "&lt;x&gt;" in chart.still("<x>", some)[0]
    ElementTree.fromstring(chart.chart(some))


def test_the_plot_is_against_what_was_varied() -> None:
    def about(*records: Record) -> list[str]:
        return chart.varied(records)

    one, two = done(1, batch=8, lr=0.1, how="ring"), done(2, batch=16, lr=0.1, how="ring")
    three, four = done(3, batch=16, lr=0.2, how="ring"), done(4, batch=16, lr=0.2, how="gloo")
    assert about(one) == []
    assert about(one, two) == ["batch"]
    assert about(one, two, three) == ["lr", "batch"]
    assert about(one, two, three, four) == ["batch", "lr", "how"]  # numbers before words
    assert about(three, four) == ["how"]


SETTINGS = st.fixed_dictionaries(
    {
        "batch": st.sampled_from([1, 8, 64, 512]),
        "lr": st.sampled_from([-1.0, 0.0, 0.1, 1e9]),
        "how": st.sampled_from(["ring", "gloo", "a very long name " * 5, ""]),
    }
)


@settings(max_examples=20)  # each draws a figure
@given(st.lists(st.tuples(SETTINGS, st.floats(0, 1e4), st.booleans()), max_size=20))
def test_every_picture_is_well_formed_and_inside(drawn: Any) -> None:
    records = [
        done(seconds, outcome="RankError" if bad else "", **setting)
        for setting, seconds, bad in drawn
    ]
    assert ("<img" in chart.still("train", records)[0]) == bool(chart.chart(records))
    well = [r for r in records if not r.outcome]
    alone = chart.chart(records)
    assert bool(alone) == bool(chart.varied(well))
    if alone:
        root = ElementTree.fromstring(alone)
        _, _, width, height = map(float, root.attrib["viewBox"].split())
        dots = [dot.attrib for dot in root.iter("{http://www.w3.org/2000/svg}use")]
        assert len(dots) >= len(well)
        assert all(0 <= float(d["x"]) <= width and 0 <= float(d["y"]) <= height for d in dots)


def test_any_result_is_plotted_against_any_parameter() -> None:
    some = [
        done(b / 100, {"loss": b + lr, "took": lr}, batch=b, lr=lr, ranks=2)
        for b in (8, 16)
        for lr in (0.1, 0.2)
    ]
    seconds, loss = chart.plot(some).axes
    assert (seconds.get_title(loc="left"), loss.get_title(loc="left")) == ("seconds", "loss")
    (took,) = chart.plot(some, ["took"], "lr").axes
    lines = [line for line in took.lines if line.get_linestyle() != "None"]
    assert [line.get_xydata().tolist() for line in lines] == [[[0.1, 0.1], [0.2, 0.2]]] * 2
    assert len({line.get_linestyle() for line in lines}) == 2  # both are seen
    assert took.get_xlabel() == "lr"
    assert [text.get_text() for text in took.figure.legends[0].texts] == ["batch=8", "batch=16"]
    (loss,) = chart.plot(some, ["loss"], "took").axes  # a result against another one
    lines = [line.get_xydata().tolist() for line in loss.lines if line.get_linestyle() != "None"]
    assert lines == [[[0.1, 8.1], [0.2, 8.2]], [[0.1, 16.1], [0.2, 16.2]]]
    with pytest.raises(ValueError, match=r"'speed' cannot be plotted: there is seconds, loss, "):
        chart.plot(some, ["speed"])
    with pytest.raises(ValueError, match="'ranks' cannot be plotted: there is lr, batch, seconds"):
        chart.plot(some, against="ranks")
    with pytest.raises(ValueError, match="run at least twice"):
        chart.plot(some[:1])


def test_what_differs_between_numbers_of_ranks_is_said() -> None:
    def run(ranks: int, steps: int) -> Record:
        return replace(done(1.0, ranks=ranks), measured={"seconds": 1.0, "steps made": steps})

    assert results.of_ranks([run(2, 40), run(2, 40)], 8) == ""
    assert results.of_ranks([done(1.0, ranks=2), done(1.0, ranks=4)], 8) == ""
    fewer = results.of_ranks([run(2, 40), run(4, 20)], 8)
    assert fewer.startswith("With 4 ranks each made 20 steps, with 2 ranks 40: fewer updates")
    same = results.of_ranks([run(6, 40), run(2, 40)], 2)
    assert "6 ranks did 3 times the work of 2" in same
    assert same.endswith("This machine has 2 processors: more ranks than that take turns.")
    panel = Chart()
    panel.show([run(2, 40), run(64_000, 40)])
    assert "take turns" in panel._note.value and ("seconds", "seconds") in panel._against.options


def test_the_chart_keeps_what_was_chosen() -> None:
    some = [done(b / 100, {"loss": b}, batch=b) for b in (8, 16)]
    panel = Chart()
    panel.show(some[:1])
    assert panel._drawn.value == ""
    panel.show(some)
    assert panel._result.label == "loss"  # what it returned comes first
    assert ">seconds</text>" not in panel._drawn.value and ">loss</text>" in panel._drawn.value
    panel._result.value = "seconds"
    assert ">seconds</text>" in panel._drawn.value and ">loss</text>" not in panel._drawn.value
    panel.show([*some, done(1, {"accuracy": 0.5, "loss": 2}, batch=32)])
    assert panel._result.value == "seconds" and ("accuracy",) * 2 in panel._result.options
    panel.show([done(1, batch=b) for b in (8, 16)])  # no loss any more
    assert (panel._result.value, panel._result.label) == (Chart.FOREMOST, "seconds")


def test_long_names_in_the_legend_have_a_line_each() -> None:
    some = [
        done(b / 100, batch=b, how=how, algorithm=a)
        for b in (8, 16)
        for how in ("momentum", "plain")
        for a in ("ring", "recursive doubling")
    ]
    figure = chart.plot(some, ["seconds"], "batch")
    figure.canvas.draw()
    box = figure.legends[0].get_window_extent()
    assert box.x0 >= 0 and box.x1 <= figure.bbox.width


def test_each_dot_says_which_run_it_is_and_its_row_is_marked() -> None:
    some = [done(b / 100, {"loss": b}, batch=b, how="<ring>") for b in (8, 16)]
    some.insert(1, done(1, outcome="stopped", batch=8, how="<ring>"))
    panel = Chart()
    panel.show(some)
    title = "<title>run 3: batch=16, how=&lt;ring&gt; → seconds=160 ms, loss=16</title>"
    assert panel._drawn.value.count(title) == 1 and "<title>run 2" not in panel._drawn.value
    assert 'data-run="3"' in panel._drawn.value and "<tr data-run=3>" in results.to_html(some)
    assert "run 3" not in chart.still("train", some)[0]  # on paper nothing can be pointed at


def test_controls_follow_a_run_and_stand_as_before_after_it() -> None:
    given = {"batch": (8, 128), "algorithm": ["ring", "gloo"], "lr": (0.01, 1.0)}
    settings = Settings(train, given)
    before = settings.complete()
    with settings.moved({"batch": 64, "algorithm": "gloo", "ranks": 2}):
        assert settings.complete() == {**before, "batch": 64, "algorithm": "gloo"}
    assert settings.complete() == before


def test_run_takes_what_the_page_shows_of_the_controls() -> None:
    knobs = {"batch": (8, 128), "algorithm": ["ring", "gloo"], "size": (64, 1024)}
    controls = {name: make(name, given) for name, given in knobs.items()}
    pressed = []
    button = Press([c.widget for c in controls.values()], lambda: pressed.append(1))
    assert [key for _, key in button.controls] == ["value", "index", "index"]
    shown = [{"value": 9}, {"index": 1}, {"index": 2}]
    button._handle_custom_msg({"shown": shown}, [])
    assert [c.value for c in controls.values()] == [9, "gloo", 256] and pressed


def test_static_pictures_stay_small() -> None:
    many = [done(0.1 * n, {"loss": 1 / n}, batch=n, how="ring") for n in range(1, 101)]
    assert len(chart.still("train", many)[0]) < 60_000
    assert "… and 88 earlier" in chart.still("train", many)[0]
    drawn = chart.picture("train", many)
    assert len(drawn.encode()) < 60_000 and "… and 88 more" in drawn
    assert ElementTree.fromstring(drawn).find("{*}svg") is not None  # the chart, below the table
    assert "no run yet" in chart.picture("train", [])


# -- the panel ----------------------------------------------------------------------


def test_a_notebook_gets_a_panel_a_picture_and_words() -> None:
    experiment = dk.Experiment(train, batch=(8, 128), algorithm=["ring", "gloo"])
    data, _ = experiment._repr_mimebundle_()
    kinds = {"application/vnd.jupyter.widget-view+json", "text/html", "image/svg+xml", "text/plain"}
    assert kinds <= {*data} and kinds - {*experiment._still.bundle()} == {min(kinds)}
    assert data["text/plain"] == "Experiment with train: no run yet"
    experiment.close()
    with pytest.raises(dk.StoppedError, match="the experiment was closed"):
        experiment.run()


def test_a_picture_of_ones_own_follows_the_controls_and_the_runs() -> None:
    from matplotlib.figure import Figure

    def picture(runs: Any, setting: dict[str, Any]) -> Figure:
        if setting["batch"] > 100:
            raise ValueError("no <picture> of so many")
        figure = Figure()
        figure.suptitle(f"batch {setting['batch']} after {len(runs)}")
        return figure

    experiment = dk.Experiment(train, picture=picture, batch=(8, 128))
    drawn = experiment.panel._chart._drawn
    assert ">batch 32 after 0</text>" in drawn.value
    experiment.settings.controls["batch"].widget.value = 64
    assert ">batch 64 after 0</text>" in drawn.value
    experiment.records += [done(0.1, batch=16), done(0.1, outcome="stopped", batch=16)]
    experiment.panel.refresh(experiment)
    assert ">batch 64 after 1</text>" in drawn.value and ">batch 64 after 1<" in experiment._svg()
    assert experiment.panel._chart._choice.layout.display == "none"
    experiment.settings.controls["batch"].widget.value = 128
    assert "<b>ValueError</b> no &lt;picture&gt; of so many" in drawn.value
    assert "2 runs" in experiment._draw()[1]
    experiment.close()
    with pytest.raises(TypeError, match=r"picture=\(1, 2\): give a function that draws"):
        dk.Experiment(train, picture=(1, 2))


def test_what_was_shown_stays_when_an_experiment_is_closed() -> None:
    experiment, sent = dk.Experiment(train, batch=(8, 128)), []
    handle: Any = SimpleNamespace(update=lambda bundle, raw: sent.append(bundle["text/plain"]))
    experiment._still._handle = handle
    experiment.records.append(done(0.5, {"loss": 0.25}, batch=8))
    experiment.close()
    assert "0.25" in sent[-1] and "no run yet" not in sent[-1]
    with pytest.raises(dk.DistkitError), experiment._busy():  # a run that ends well or not
        experiment.records.append(done(0.5, {"loss": 0.125}, batch=16))
        raise dk.RunInterrupted("stopped")
    assert "0.125" in sent[-1]


def test_what_went_wrong_is_told_in_words() -> None:
    experiment = dk.Experiment(train)
    assert message(experiment) == ""
    text = "rank 1 raised ValueError: a < b at x.py:3\n\nTraceback on rank 1:\n  a < b"
    experiment.trouble = dk.RankError(text, rank=1)
    told = message(experiment)
    assert "<b>RankError</b> rank 1 raised ValueError: a &lt; b at x.py:3<pre" in told
    assert "Traceback on rank 1:\n  a &lt; b</pre>" in told
    experiment.trouble = dk.RunInterrupted("train was interrupted")
    assert "dkx-note" in message(experiment) and "RunInterrupted" not in message(experiment)


def test_tabs_hold_what_fits() -> None:
    mark = Event(
        0, 0, Op.MARK, State.COMPLETED, 0.0, attributes={"watched": "gradient", "name": "w"}
    )
    send = Event(0, 1, Op.SEND, State.STARTED, 0.0, peer=1, nbytes=8)
    assert fitting(Trace()) == ["Timeline"]
    assert fitting(Trace([mark])) == ["Timeline", "Gradients"]
    assert fitting(Trace([send])) == ["Timeline", "Stage"]
    assert fitting(Trace([mark, send])) == ["Timeline", "Stage", "Gradients"]
    served = Trace([send], {"ranks": {"1": {"name": "server 0", "role": "server"}}})
    assert fitting(served) == ["Timeline", "Servers"]
