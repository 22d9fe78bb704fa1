"""The concept checks: five questions each, whose answers are computed and can be chosen."""

from __future__ import annotations

from typing import Any

import IPython.display
import pytest

from distkit.cli import main
from distkit.errors import DistkitError
from distkit.views.timeline.columns import Columns
from distkit.views.widget.view import View
from distkit_course.content.quizzes import CONCEPTS, systems
from distkit_course.predictions import Prediction
from distkit_course.quizzes import concept_check


def places(lesson: str) -> list[int]:
    """Where the right answer of each question stands among its choices."""
    concept = CONCEPTS[lesson]
    trace = concept.trace()
    asked = [Prediction(ask.text, ask.choices) for ask in concept.asks]
    return [
        one.choices.index(one.compare(ask.answer(trace)).actual)  # type: ignore[arg-type]
        for one, ask in zip(asked, concept.asks, strict=True)
    ]


@pytest.mark.parametrize("lesson", CONCEPTS)
def test_a_concept_check(lesson: str) -> None:
    right = places(lesson)
    assert len(right) == 5 and len(set(right)) > 1  # not always at the same place
    assert places(lesson) == right  # whoever asks again gets the same run
    check = concept_check(lesson)
    for number, (ask, place) in enumerate(zip(check.concept.asks, right, strict=True), 1):
        assert ask.text.endswith("?") and ask.why
        assert 3 <= len({*map(str, ask.choices)}) == len(ask.choices)
        with pytest.raises(DistkitError, match="none of the choices"):
            check.answer(number, "no such choice")
        assert check.answer(number, ask.choices[place])
        with pytest.raises(DistkitError, match="there already"):
            check.answer(number, ask.choices[place])
    assert check.score.startswith("5 of 5 right")
    assert isinstance(check.view, View)
    about = Columns(check.trace).frame
    origins = {*about["facts"], *(lane["detail"] for lane in about["lanes"])}
    assert not {"made up", "simulated"} <= origins  # one word for one thing


def test_the_made_up_gpu_is_done_while_its_rank_waits_for_the_value() -> None:
    """And not where two marks meet: there rounding would choose the answer."""
    trace = systems.two_gpus()
    assert systems.waits_in(trace) == "x[0].item()"
    over = systems.reduces(trace)[0].start + systems.on_gpu(trace)
    edges = [t for s in trace.spans for t in (s.start, s.end)]
    assert min(abs(over - t) for t in edges) > 1e-4


def test_wrong_answers_count_nothing() -> None:
    check = concept_check("00_welcome")
    for number, (ask, place) in enumerate(
        zip(check.concept.asks, places("00_welcome"), strict=True), 1
    ):
        assert not check.answer(number, ask.choices[place - 1])
        assert f"{number} of 5 questions answered, 0 right" == check.score or number == 5
    assert check.score == "0 of 5 right: look again at the others"
    with pytest.raises(DistkitError, match="they are 1 to 5"):
        check.answer(0, "rank 0")
    with pytest.raises(DistkitError, match="There are: \\['00_welcome'"):
        concept_check("100_dreams")


def test_a_teacher_sees_questions_answers_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["answers", "00", "01"]) == 0
    said = capsys.readouterr().out
    for lesson in ("00_welcome", "01_messages"):
        concept = CONCEPTS[lesson]
        assert f"{lesson}\n{concept.about}\n" in said
        for number, (ask, place) in enumerate(zip(concept.asks, places(lesson), strict=True), 1):
            assert f"\n{number}. {ask.text}\n   {ask.choices[place]}\n   {ask.why}\n" in said
    assert "02_all_reduce" not in said
    assert main(["answers", "99"]) == 1
    assert "there is no lesson '99'. There are: 00_welcome" in capsys.readouterr().err
    assert main(["answers"]) == 0
    assert [line for line in capsys.readouterr().out.splitlines() if line in CONCEPTS] == [
        *CONCEPTS
    ]


def test_a_student_sees_no_answer_before_the_own_one() -> None:
    check = concept_check("00_welcome")
    said = repr(check) + "".join(map(repr, check._predictions)) + repr(check.concept.about)
    assert not [ask for ask in check.concept.asks if ask.why in said]


def test_wrong_answers_can_be_given_again() -> None:
    check = concept_check("01_messages")
    right = places("01_messages")
    for number, (ask, place) in enumerate(zip(check.concept.asks, right, strict=True), 1):
        check.answer(number, ask.choices[place - (number == 4)])
    assert check.form.picture["again"] and check.score.startswith("4 of 5 right")
    check._heard({"again": True})
    assert check.score == "4 of 5 questions answered, 4 right"
    asked = check.form.picture["questions"]
    assert [one["final"] for one in asked] == [True, True, True, False, True]
    assert "answer:" not in asked[3]["note"]
    assert check.answer(4, 2) and check.score.startswith("5 of 5")
    assert not check.form.picture["again"]


@pytest.mark.parametrize("lesson", ["01_messages", "05_when_it_hangs"])
def test_the_picture_tells_no_sums_and_no_findings(lesson: str) -> None:
    view = concept_check(lesson).view
    picture = view.get_state("picture")["picture"]
    assert picture["bare"] and not picture["notices"]
    whole = type(view)(concept_check(lesson).trace)
    words = whole.get_state("picture")["picture"]["notices"]
    for said in (view._svg(), repr(view)):
        assert words and not [one for one in words if one in said]
    assert "in communication" not in view._svg() and "first to last" not in repr(view)


def test_a_notebook_shows_all_questions_and_the_score(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[Any] = []
    told: list[str] = []

    class Handle:
        def update(self, bundle: dict[str, str], **_: object) -> None:
            told.append(bundle["text/plain"])

    def display(thing: object, **_: object) -> Handle:
        shown.append(thing)
        return Handle()

    monkeypatch.setattr(IPython.display, "display", display)
    check = concept_check("01_messages")
    check._ipython_display_()
    still = shown[2]["text/html"]
    assert all(ask.text.split("`")[0] in still for ask in check.concept.asks)
    assert "<code>send</code>?" in still
    check._heard({"number": 0, "guess": ""})  # in the browser
    assert "Choose one" in check.form.picture["questions"][0]["note"]
    check._heard({"number": 0, "guess": "rank 1"})
    assert told[-1].endswith("1 of 5 questions answered, 1 right")
    assert "rank 1" in repr(check) and "busy" in repr(check)
