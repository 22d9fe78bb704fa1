"""Concept checks, each with five questions about a new run.

Example::

    check = dk.concept_check("01_messages")
    check                                           # shows a run and five questions
    check.answer(1, "rank 2")                       # answers question 1 in code
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import anywidget
import traitlets

from distkit.errors import DistkitError
from distkit.views.scenes import Servers
from distkit.views.timeline.view import Timeline
from distkit.views.widget.assets import css, esm
from distkit_course.content.runs import OF_SERVERS, RUNS
from distkit_course.predictions import Comparison, Prediction, StaticForm
from distkit_course.questions import sections


@dataclass(frozen=True)
class Choice:
    """A multiple-choice question; ``why`` explains where the view shows the answer."""

    text: str
    choices: tuple[str, ...]
    answer: str
    why: str

    @classmethod
    def read(cls, text: str, body: str) -> Choice:
        """Parse a question of ``quizzes.md``."""
        options = re.findall(r"^- \[(.)\] (.+)$", body, flags=re.M)
        (answer,) = (choice for mark, choice in options if mark == "x")
        why = " ".join(re.sub(r"^- .*$", "", body, flags=re.M).split())
        return cls(text, tuple(choice for _, choice in options), answer, why)


@dataclass(frozen=True)
class Quiz:
    """The concept check of a lesson, with a description of its run and its questions."""

    lesson: str
    description: str
    questions: tuple[Choice, ...]

    @property
    def answers(self) -> str:
        """The answer key: each question with its answer and explanation."""
        lines = [self.lesson, self.description]
        for number, question in enumerate(self.questions, 1):
            lines += [f"{number}. {question.text}", f"   {question.answer}", f"   {question.why}"]
        return "\n".join(lines)


#: The concept check of each lesson.
QUIZZES = {
    lesson: Quiz(lesson, " ".join(text.split()), tuple(Choice.read(*part) for part in parts))
    for lesson, text, parts in sections("quizzes.md")
}


class _Form(anywidget.AnyWidget):
    _esm, _css = esm("concept"), css("concept")
    picture = traitlets.Dict().tag(sync=True)


class ConceptCheck(StaticForm):
    """The form of a quiz, created by :func:`concept_check`."""

    _widget = _Form

    def __init__(self, quiz: Quiz) -> None:
        self.quiz, self.trace = quiz, RUNS[quiz.lesson]()
        # bare, because totals and notices would give away some answers
        self.view = (Servers if quiz.lesson in OF_SERVERS else Timeline)(self.trace, bare=True)
        self._verdicts: dict[int, Comparison] = {}
        self._predictions = [
            self._prediction(n, choice) for n, choice in enumerate(quiz.questions, 1)
        ]

    def _prediction(self, number: int, question: Choice) -> Prediction:
        def judge() -> None:
            self._verdicts[number] = prediction.compare(question.answer)
            self._refresh()

        prediction = Prediction(
            f"{number}. {question.text}", question.choices, on_commit=judge, why=question.why
        )
        return prediction

    def answer(self, number: int, choice: object) -> Comparison:
        """Answer a question, counted from 1, with one of its choices; return the verdict.

        Raises:
            DistkitError: the question or choice does not exist, or the question has already been
                answered.
        """
        if number not in range(1, len(self._predictions) + 1):
            raise DistkitError(
                f"Question {number!r} does not exist: use 1 to {len(self._predictions)}."
            )
        self._predictions[number - 1].commit(choice)  # type: ignore[arg-type]
        return self._verdicts[number]

    def again(self) -> None:
        """Reset the wrong answers."""
        for number in [n for n, verdict in self._verdicts.items() if not verdict]:
            del self._verdicts[number]
            self._predictions[number - 1] = self._prediction(
                number, self.quiz.questions[number - 1]
            )
        self._refresh()

    @property
    def score(self) -> str:
        """A sentence with the number of right answers."""
        total, answered = len(self._predictions), len(self._verdicts)
        right = sum(map(bool, self._verdicts.values()))
        if answered < total:
            return f"{answered} of {total} questions answered, {right} right"
        verdict = "you can read this view" if right == total else "review your wrong answers"
        return f"{right} of {total} right: {verdict}"

    # -- display -------------------------------------------------------------------------

    def _picture(self) -> dict[str, object]:
        complete = len(self._verdicts) == len(self._predictions)
        return {
            "questions": [prediction._picture() for prediction in self._predictions],
            "score": self.score,
            "again": complete and not all(self._verdicts.values()),
        }

    def _submit(self, message: Mapping[str, Any]) -> None:
        if message.get("again"):
            self.again()
        else:
            self._predictions[message["number"]]._submit(message)
            self._refresh()

    def _draw(self, text: str = "") -> tuple[str, str]:
        return super()._draw("\n".join([*map(repr, self._predictions), self.score]))

    def _ipython_display_(self) -> None:
        from IPython.display import Markdown, display

        display(Markdown(self.quiz.description))
        display(self.view)
        super()._ipython_display_()

    def __repr__(self) -> str:
        return "\n".join([self.quiz.description, self._draw()[1]])


def concept_check(lesson: str) -> ConceptCheck:
    """Show a new run and ask five questions about it.

    Args:
        lesson: the name of a notebook, such as ``"01_messages"``.

    Raises:
        DistkitError: the lesson has no concept check.

    >>> check = concept_check("01_messages")
    >>> check.answer(1, "none").message
    'not what you expected'
    >>> check.score
    '1 of 5 questions answered, 0 right'
    """
    if lesson not in QUIZZES:
        raise DistkitError(f"Concept check {lesson!r} does not exist. Available: {[*QUIZZES]}.")
    return ConceptCheck(QUIZZES[lesson])
