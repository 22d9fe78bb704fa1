"""Concept checks: five multiple-choice questions each."""

from __future__ import annotations

import pytest

from distkit.cli import main
from distkit.errors import DistkitError
from distkit.views.timeline.columns import Columns
from distkit.views.widget.view import View
from distkit_course.quizzes import QUIZZES, concept_check


@pytest.mark.parametrize("lesson", QUIZZES)
def test_concept_check_scores_answers(lesson: str) -> None:
    check = concept_check(lesson)
    questions = check.quiz.questions
    assert len(questions) == 5
    # correct answers at different positions
    assert len({question.choices.index(question.answer) for question in questions}) > 1
    for number, question in enumerate(questions, 1):
        assert question.text.endswith("?") and question.why
        assert 3 <= len({*question.choices}) == len(question.choices)
        with pytest.raises(DistkitError, match="not one of the choices"):
            check.answer(number, "no such choice")
        assert check.answer(number, question.answer)
        with pytest.raises(DistkitError, match="already known"):
            check.answer(number, question.answer)
    assert check.score.startswith("5 of 5 right")
    assert isinstance(check.view, View)
    about = Columns(check.trace).frame
    origins = {*about["facts"], *(lane["detail"] for lane in about["lanes"])}
    assert not {"drawn", "simulated"} <= origins


def test_wrong_answers_score_zero() -> None:
    check = concept_check("00_welcome")
    for number, question in enumerate(check.quiz.questions, 1):
        assert not check.answer(
            number, question.choices[question.choices.index(question.answer) - 1]
        )
        assert f"{number} of 5 questions answered, 0 right" == check.score or number == 5
    assert check.score == "0 of 5 right: review your wrong answers"
    with pytest.raises(DistkitError, match="use 1 to 5"):
        check.answer(0, "rank 0")
    with pytest.raises(DistkitError, match="Available: \\['00_welcome'"):
        concept_check("100_unknown")


def test_instructor_sees_questions_answers_and_explanations(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["answers", "00", "01"]) == 0
    output = capsys.readouterr().out
    for lesson in ("00_welcome", "01_messages"):
        quiz = QUIZZES[lesson]
        assert f"{lesson}\n{quiz.description}\n" in output
        for number, question in enumerate(quiz.questions, 1):
            assert (
                f"\n{number}. {question.text}\n   {question.answer}\n   {question.why}\n" in output
            )
    assert "02_all_reduce" not in output
    assert main(["answers", "99"]) == 1
    assert "no lesson starts with '99'. Available: 00_welcome" in capsys.readouterr().err
    assert main(["answers"]) == 0
    assert [line for line in capsys.readouterr().out.splitlines() if line in QUIZZES] == [*QUIZZES]


def test_answers_are_hidden_until_the_student_answers() -> None:
    check = concept_check("00_welcome")
    output = repr(check) + "".join(map(repr, check._predictions)) + repr(check.quiz.description)
    assert not [question for question in check.quiz.questions if question.why in output]


def test_wrong_answers_can_be_retried() -> None:
    check = concept_check("01_messages")
    for number, question in enumerate(check.quiz.questions, 1):
        check.answer(
            number, question.choices[question.choices.index(question.answer) - (number == 4)]
        )
    assert check.form.picture["again"] and check.score.startswith("4 of 5 right")
    check._submit({"again": True})
    assert check.score == "4 of 5 questions answered, 4 right"
    asked = check.form.picture["questions"]
    assert [question["final"] for question in asked] == [True, True, True, False, True]
    assert "answer:" not in asked[3]["note"]
    assert check.answer(4, 2) and check.score.startswith("5 of 5")
    assert not check.form.picture["again"]


@pytest.mark.parametrize("lesson", ["01_messages", "04_when_it_hangs"])
def test_quiz_view_hides_totals_and_notices(lesson: str) -> None:
    view = concept_check(lesson).view
    picture = view.get_state("picture")["picture"]
    assert picture["bare"] and not picture["notices"] + picture["notes"]
    complete = type(view)(concept_check(lesson).trace)
    notices = complete.get_state("picture")["picture"]["notices"]
    for output in (view._svg(), repr(view)):
        assert notices and not [notice for notice in notices if notice in output]
    assert "in communication" not in view._svg() and "first to last" not in repr(view)
