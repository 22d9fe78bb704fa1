"""Predictions: guesses, their distance from the answer, and their display."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from distkit.errors import DistkitError
from distkit_course import predictions
from distkit_course.predictions import Prediction, predict


def compare_guess(guess: Any, actual: Any, choices: list[Any] | None = None) -> tuple[str, str]:
    prediction = predict("How many?", choices)
    prediction.commit(guess)
    card = prediction.compare(actual)
    assert bool(card) == (card.status == "pass")
    return card.status, card.message


@pytest.mark.parametrize(
    ("guess", "actual", "expected"),
    [
        (6, 6, ("pass", "exactly right")),
        ("6", 6, ("pass", "exactly right")),
        ("6 messages", torch.tensor(3), ("fail", "twice the answer")),
        ("1,024", np.int64(1024), ("pass", "exactly right")),
        (3, 12, ("fail", "the answer is four times as much")),
        (1, 31, ("fail", "the answer is 31 times as much")),
        (0.98, 0.5, ("fail", "about twice the answer")),
        (5, 6, ("fail", "1 too low")),
        (105, 100, ("close", "5 too high")),
        ("0.52 s", 0.5, ("close", "4% more than the answer")),
        (16, 15.997, ("pass", "exactly right")),  # shown as 16
        (15.9, 15.997, ("close", "0.606% less than the answer")),
        (1, 0, ("fail", "1 too high")),
        (-1.5, 0.0, ("fail", "1.5 below the answer")),
        (" Rank  0", "rank 0", ("pass", "exactly right")),
        ("about ~3 ms", 3, ("pass", "exactly right")),
        ("the 3rd", 3, ("pass", "exactly right")),
        ("rank 0 and rank 4", [0, 4], ("pass", "exactly right")),
        ("1,024, 2,048", [1024, 2048], ("pass", "exactly right")),
        ("1,024", [1, 24], ("pass", "exactly right")),
        ("3", [3, 5, 4], ("fail", "3 numbers in the answer, 1 in the guess")),
        ([1, 2], 2.2, ("fail", "1 number in the answer, 2 in the guess")),
        (3, ["send", "recv"], ("fail", "2 numbers in the answer, 1 in the guess")),
        ("9" * 5000, 6, ("fail", "inf% more than the answer")),
        ("0, 1 2", [0, 1, 2], ("pass", "exactly right")),
        ([0, 1, 2], range(3), ("pass", "exactly right")),
        ("[6, 6]", (6, 3), ("fail", "1 of 2 are right\n[1] 6: twice the answer")),
    ],
)
def test_card_describes_the_distance_from_the_answer(
    guess: Any, actual: Any, expected: tuple[str, str]
) -> None:
    assert compare_guess(guess, actual) == expected


def test_choices_are_compared_by_text() -> None:
    assert compare_guess("YES", True, ["yes", "no"]) == ("pass", "exactly right")
    assert compare_guess(2, 4, [2, 4, 8]) == ("fail", "not what you expected")
    assert compare_guess("no, it  hangs", "yes", ["yes", "no, it hangs"])[0] == "fail"


def test_long_lists_show_the_first_mistakes() -> None:
    words = compare_guess([0] * 9, [1] * 9)[1].splitlines()
    assert words[0] == "0 of 9 are right" and words[1] == "[0] 0: 1 too low"
    assert words[-1] == "and 3 more" and len(words) == 8


@pytest.mark.parametrize(
    ("question", "guess", "remedy"),
    [
        ("How many?", "many", "Enter a number in digits"),
        ("How many?", "  ", "Enter a number in digits"),
        ("How many?", ["send", "recv"], "Enter a number in digits"),
        ("How many?", True, "Enter a number in digits"),
        ("How many? (two numbers)", "3", "Enter two numbers"),
        ("Which two numbers? For example: 5, 7", "1, 2, 3", "Enter two numbers"),
        ("How many?", {}, r"\{\} \(dict\) cannot be compared"),
    ],
)
def test_guess_of_the_wrong_type_is_rejected(question: str, guess: Any, remedy: str) -> None:
    prediction = predict(question)
    with pytest.raises(DistkitError, match=remedy):
        prediction.commit(guess)
    assert prediction.guess is None
    prediction.commit("5, 7")
    assert prediction.compare([5, 7])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p: p.commit("perhaps"), "guess 'perhaps' is not one of the choices: yes · no"),
        (lambda p: p.commit(""), "Select one"),
        (lambda p: p.compare(3), "The answer '3' is not one of the choices"),
        (lambda p: predict("Does it end?", ["yes", "Yes"]), "two or more different choices"),
    ],
)
def test_unknown_choice_is_rejected(call: Callable[[Prediction], object], message: str) -> None:
    prediction = predict("Does it end?", ["yes", "no"])
    with pytest.raises(DistkitError, match=message):
        call(prediction)


def test_guess_can_change_until_the_answer() -> None:
    prediction = predict("How many?")
    prediction.commit(7)
    prediction.commit(6)
    assert prediction.compare(6) and not prediction.compare(7)  # another run
    late = predict("How many?")
    card = late.compare(6, "ms")
    assert card.status == "unknown" and not card
    with pytest.raises(DistkitError, match="is already known"):
        late.commit(6)
    assert "your guess" not in repr(card) and "6 ms" in repr(card)


def test_card_has_text_and_escaped_html() -> None:
    prediction = predict("Is 1 < 2?", ["<yes>", "no"])
    prediction.commit("no")
    card = prediction.compare("<yes>")
    assert repr(card).splitlines()[1:] == [
        "  your guess    no",
        "  the answer    <yes>",
        "  ✗             not what you expected",
    ]
    html = card._repr_html_()
    assert "&lt;yes&gt;" in html and "Is 1 &lt; 2?" in html and "<yes>" not in html
    assert html.index(">your guess<") < html.index(">the answer<") < html.index(">verdict<")


def test_rerun_cell_keeps_the_pending_guess(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predictions, "running_cell_id", lambda: "cell-1")

    def rerun() -> Prediction:
        return predict("How many?")

    first = rerun()
    second = rerun()
    assert second is not first  # no guess was lost
    second.commit(3)
    assert rerun() is second
    second.compare(3)
    assert rerun().guess is None
