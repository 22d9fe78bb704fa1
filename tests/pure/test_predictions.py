"""Predictions: what can be guessed, how far it is from the answer, and what a notebook shows."""

from __future__ import annotations

from typing import Any

import IPython.display
import numpy as np
import pytest
import torch

from distkit.errors import DistkitError
from distkit.exercises import predictions
from distkit.exercises.predictions import Prediction, predict


def compared(guess: Any, actual: Any, choices: list[Any] | None = None) -> tuple[str, str]:
    made = predict("How many?", choices)
    made.commit(guess)
    card = made.compare(actual)
    assert bool(card) == (card.status == "pass")
    return card.status, card.words


@pytest.mark.parametrize(
    ("guess", "actual", "said"),
    [
        (6, 6, ("pass", "exactly right")),
        ("6", 6, ("pass", "exactly right")),
        ("6 messages", torch.tensor(3), ("fail", "twice what the run says")),
        ("1,024", np.int64(1024), ("pass", "exactly right")),
        (3, 12, ("fail", "the run says four times as much")),
        (1, 31, ("fail", "the run says 31 times as much")),
        (0.98, 0.5, ("fail", "about twice what the run says")),
        (5, 6, ("fail", "1 too low")),
        (105, 100, ("close", "5 too high")),
        ("0.52 s", 0.5, ("close", "4 % more than the run says")),
        (1, 0, ("fail", "1 too high")),
        (-1.5, 0.0, ("fail", "1.5 below what the run says")),
        (" Rank  0", "rank 0", ("pass", "exactly right")),
        ("0, 1 2", [0, 1, 2], ("pass", "exactly right")),
        ([0, 1, 2], range(3), ("pass", "exactly right")),
        ("[6, 6]", (6, 3), ("fail", "1 of 2 are right\n[1] 6: twice what the run says")),
        ("send, Recv", ["send", "recv"], ("pass", "exactly right")),
    ],
)
def test_how_far_apart(guess: Any, actual: Any, said: tuple[str, str]) -> None:
    assert compared(guess, actual) == said


def test_choices_are_compared_by_their_words() -> None:
    assert compared("YES", True, ["yes", "no"]) == ("pass", "exactly right")
    assert compared(2, 4, [2, 4, 8]) == ("fail", "not what you expected")
    assert compared("no, it  hangs", "yes", ["yes", "no, it hangs"])[0] == "fail"


def test_long_lists_say_the_first_mistakes() -> None:
    words = compared([0] * 9, [1] * 9)[1].splitlines()
    assert words[0] == "0 of 9 are right" and words[1] == "[0] 0: 1 too low"
    assert words[-1] == "and 3 more" and len(words) == 8


@pytest.mark.parametrize(
    ("guess", "actual", "remedy"),
    [
        ("many", 6, "guess a number"),
        ([1, 2], 6, "guess a number"),
        (6, [1, 2], "guess 2 items"),
        ("1, 2, 3", [1, 2], "guess 2 items"),
        ("a b", [1, 2], "guess a number"),
        (6, {}, r"\{\} \(dict\) cannot be compared"),
        (6, [[1]], "Give a number, words, or a list"),
        ("  ", 6, "Give a number, words, or a list"),
    ],
)
def test_other_kinds_are_refused(guess: Any, actual: Any, remedy: str) -> None:
    with pytest.raises(DistkitError, match=remedy):
        compared(guess, actual)


def test_what_is_no_choice_is_refused() -> None:
    made = predict("Does it end?", ["yes", "no"])
    with pytest.raises(DistkitError, match="The guess 'perhaps' is none of the choices: yes · no"):
        made.commit("perhaps")
    with pytest.raises(DistkitError, match="The answer '3' is none of the choices"):
        made.compare(3)
    with pytest.raises(DistkitError, match="two or more different choices"):
        predict("Does it end?", ["yes", "Yes"])


def test_a_guess_is_made_once_and_before_the_run() -> None:
    made = predict("How many?")
    made.commit(6)
    with pytest.raises(DistkitError, match="You have committed 6"):
        made.commit(7)
    assert made.compare(6) and not made.compare(7)  # another run
    late = predict("How many?")
    card = late.compare(6)
    assert card.status == "unknown" and not card
    with pytest.raises(DistkitError, match="answered already"):
        late.commit(6)
    assert "your guess" not in repr(card) and "6" in repr(card)


def test_cards_are_text_and_html() -> None:
    made = predict("Is 1 < 2?", ["<yes>", "no"])
    made.commit("no")
    card = made.compare("<yes>")
    assert repr(card).splitlines()[1:] == [
        "  your guess    no",
        "  the run says  <yes>",
        "  ✗             not what you expected",
    ]
    html = card._repr_html_()
    assert "&lt;yes&gt;" in html and "Is 1 &lt; 2?" in html and "<yes>" not in html


def test_the_form_shows_no_answer_before_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[Any] = []
    monkeypatch.setattr(IPython.display, "display", lambda thing, **_: shown.append(thing))
    made = predict("How many?", [3, 6])
    made._ipython_display_()
    assert [("text/html" in s, "How many?" in s.get("text/plain", "")) for s in shown] == [
        (True, True),
        (True, False),
    ]

    def picture() -> dict[str, Any]:
        return dict(made.form.picture)

    assert picture()["open"] and picture()["choices"] == ["3", "6"]
    made._entered("4")  # what no browser sends
    assert picture()["open"] and "none of the choices" in picture()["note"]
    made._entered("6")
    assert not picture()["open"] and picture()["guess"] == "6"
    made.compare(3)
    assert picture()["note"] == "the run says 3"


def test_a_cell_that_runs_again_keeps_what_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predictions, "cell", lambda: "cell-1")

    def again() -> Prediction:
        return predict("How many?")

    first = again()
    second = again()
    assert second is not first  # nothing was lost
    second.commit(3)
    assert again() is second
    second.compare(3)
    assert again().guess is None
