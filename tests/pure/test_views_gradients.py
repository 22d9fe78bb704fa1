"""Gradients of a training loop: marks, comparison of ranks, static picture."""

import json
import math
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest
import torch
import traces
from hypothesis import given, settings
from hypothesis import strategies as st
from test_views_tensors import events
from traces import Script, summary

from distkit.events import Op
from distkit.recording import recorder
from distkit.recording.gradients import watch_gradients
from distkit.recording.recorder import Recorder, to_table
from distkit.trace.trace import Trace
from distkit.trace.training import read
from distkit.views.gradients import agreement, draw, project
from distkit.views.scene.renderer import to_svg
from distkit.views.scenes import Gradients

OWN = [[1.0, 0.0, 2.0, -1.0], [3.0, 1.0, 0.0, -1.0]]
SUM = [4.0, 1.0, 2.0, -2.0]
MEAN = [2.0, 0.5, 1.0, -1.0]


def training_trace(
    reduced_gradients,
    steps=2,
    crcs=("aaaa", "aaaa"),
    reference=None,
    samples=(32, 32),
    gradients=OWN,
) -> Trace:
    """Return the trace of watch_gradients for a loop on two ranks with one layer."""
    s = Script()
    for rank, (own, after) in enumerate(zip(gradients, reduced_gradients, strict=True)):
        s.op(
            rank,
            Op.MARK,
            0,
            0,
            attributes={"watched": "weights", "checksum": "0000"},
            after=summary([0.0] * 64, 10),
        )
        for n in range(steps):
            at = 0.01 * (n + 1)
            if reference:
                s.op(
                    rank,
                    Op.MARK,
                    at,
                    at,
                    attributes={"watched": "reference", "name": "w"},
                    after=summary(reference),
                )
            s.op(
                rank,
                Op.MARK,
                at,
                at + 0.002,
                attributes={"watched": "gradient", "name": "w"},
                shape=(4,),
                dtype="float32",
                before=summary(own),
                after=summary(after),
            )
            s.op(
                rank,
                Op.MARK,
                at + 0.003,
                at + 0.003,
                attributes={"watched": "step"},
                after=summary([2.0 - n + rank, 0.1, samples[rank]]),
            )
            s.op(
                rank,
                Op.MARK,
                at + 0.004,
                at + 0.004,
                attributes={"watched": "weights", "checksum": crcs[rank]},
                after=summary([float(rank * (crcs[0] != crcs[1]))] * 64, 10),
            )
    return s.trace(world_size=2)


def texts(trace: Trace) -> list[tuple[str, str]]:
    return [(v["word"], v["text"]) for v in project(trace).verdicts]


def layer(trace: Trace):
    """Return the layer's gradients in the first step."""
    return project(trace).steps[0]["w"]


# -- reduced gradients -----------------------------------------------------------------


@pytest.mark.parametrize(("after", "kind"), [(SUM, "sum"), (MEAN, "mean")])
def test_sum_and_mean_are_shown_as_an_average(after, kind) -> None:
    trace = training_trace([after, after], reference=MEAN)
    found = layer(trace)
    assert (found.kind, found.same, found.largest_difference) == (kind, True, 0)
    assert [s.values for s in found.after] == [tuple(MEAN)]
    assert " at step 1" in to_svg(draw(trace))  # the drift
    assert texts(trace) == [
        (
            "same",
            f"after the all-reduce every rank has the same gradient: the {kind} over all 2 ranks",
        ),
        ("same", "one process computes exactly the same"),
        ("same", "the replicas' weights are bitwise equal at every step"),
    ]


def test_unaveraged_gradients_are_reported() -> None:
    assert texts(training_trace(OWN, crcs=("aaaa", "bbbb"), reference=MEAN))[:3] == [
        ("different", "every rank keeps its own gradient: nothing was averaged"),
        ("different", "the single-process gradient differs by up to 1.0"),
        (
            "different",
            "the replicas' weights first differ after step 1; "
            "after step 2, rank 1 is at a distance of about 8 from rank 0",
        ),
    ]


def test_rank_with_a_different_result_is_reported() -> None:
    after = [SUM, [4.0, 1.0, 2.0, 0.0]]
    assert texts(training_trace(after))[0] == (
        "different",
        "after step 1, the ranks' gradients of w still differ",
    )
    found = layer(training_trace(after))
    assert (found.kind, found.same, len(found.after)) == ("other", False, 2)


def test_step_during_the_all_reduce_is_unfinished() -> None:
    s = Script()
    for rank, own in enumerate(OWN):
        s.op(
            rank,
            Op.MARK,
            0,
            None,
            attributes={"watched": "gradient", "name": "w"},
            shape=(4,),
            before=summary(own),
        )
    trace = s.trace(world_size=2)
    found = layer(trace)
    assert (found.kind, found.after) == ("", [])
    assert [list(found.before[r].values) for r in (0, 1)] == OWN
    assert texts(trace) == [] and draw(trace, live=True)["live"]


@given(st.lists(st.lists(st.floats(-9, 9), min_size=5, max_size=5), min_size=2, max_size=5))
def test_agreement_is_the_weighted_mean_of_the_cosines(rows: list[list[float]]) -> None:
    gradients = [summary(row) for row in rows]
    mean = [math.fsum(column) / len(rows) for column in zip(*rows, strict=True)]
    computed = agreement(gradients, summary(mean))
    pairs = [(a, b) for a in gradients for b in gradients if a is not b]
    weights = sum(a.norm * b.norm for a, b in pairs)
    if math.isnan(computed) or weights < 1e-6:
        return
    dots = sum(sum(x * y for x, y in zip(a.values, b.values, strict=True)) for a, b in pairs)
    assert computed == pytest.approx(dots / weights, abs=1e-3)


# -- the curves ------------------------------------------------------------------------------


NOTES = [
    {"watched": "step"},
    {"watched": "gradient", "name": "w"},
    {"watched": "gradient"},
    {"watched": "reference", "name": "w"},
    {"watched": "weights", "checksum": "1"},
    {"watched": "weights"},
]


@settings(max_examples=60)
@given(st.lists(events, max_size=30), st.lists(st.sampled_from(NOTES), max_size=30))
def test_any_marks_are_drawn(found, notes) -> None:
    marks = [
        replace(
            e,
            op=Op.MARK,
            attributes=note,
            summary=e.summary if e.summary and e.summary.values else None,
        )
        for e, note in zip(found, notes, strict=False)
        if e.summary is None or e.summary.values
    ]
    picture = draw(Trace(marks))
    json.dumps(picture, allow_nan=False)
    ET.fromstring(to_svg(picture))
    repr(Gradients(Trace(marks)))


def test_unwatched_run_names_the_remedy() -> None:
    assert "dk.watch_gradients(model)" in repr(Gradients(Trace()))
    assert "dk.watch_gradients(model)" in to_svg(draw(Trace()))


# -- recording ----------------------------------------------------------------------------------


@pytest.fixture
def recording():
    """Record this process as rank 0; return a function that returns the trace."""
    rec = Recorder(0)
    recorder.set_current(rec)
    yield lambda: Trace(to_table(0, rec.drain()), traces.info(world_size=1))
    recorder.set_current(None)


def net() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))


def test_loop_records_gradients_before_and_after(recording) -> None:
    model, x = net(), torch.ones(4, 3)
    with watch_gradients(model) as watch:
        for _ in range(2):
            model.zero_grad()
            loss = model(x).square().mean()
            watch.reference(model(x).square().mean())
            loss.backward()
            own = model[0].weight.grad.clone()
            model[0].weight.grad *= 2  # in place of an all-reduce
            watch.step(loss=loss, lr=0.5, samples=4)
    training = read(recording())
    assert list(training.layers) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    step = training.steps[1]
    assert step.before["0.weight"][0].values == tuple(own.flatten().tolist())
    assert step.after["0.weight"][0].values == tuple((2 * own).flatten().tolist())
    assert step.reference["0.weight"][0].values == pytest.approx(own.flatten().tolist())
    assert step.reports[0].loss == pytest.approx(loss.item()) and step.reports[0].samples == 4
    assert sorted(training.weights) == [0, 1, 2]
    assert not model[0].weight._post_accumulate_grad_hooks


def test_watching_without_a_recorder_does_nothing() -> None:
    model = net()
    with watch_gradients(model) as watch:
        watch.reference(model(torch.ones(1, 3)).sum())
        watch.step(loss=1.0)
    assert all(w.grad is None for w in model.parameters())


def test_largest_parameters_of_a_large_model_are_watched(recording) -> None:
    model = net()
    with watch_gradients(model, max_parameters=1) as watch:
        model(torch.ones(1, 3)).sum().backward()
        watch.step()
    training = read(recording())
    assert list(training.layers) == ["0.weight"]
    assert math.isnan(training.steps[0].reports[0].loss)


def test_shares_of_different_sizes_are_weighted() -> None:
    """With three examples on one rank and one on the other, the mean of means is wrong."""
    weighted = [(3 * a + b) / 4 for a, b in zip(*OWN, strict=True)]
    nothing = [OWN[0], [math.nan] * 4]
    for own, after, samples, kind in [
        (OWN, weighted, (1, 1), "other"),
        (OWN, weighted, (3, 1), "mean"),
        (nothing, OWN[0], (2, 0), "mean"),
    ]:
        assert layer(training_trace([after] * 2, gradients=own, samples=samples)).kind == kind
