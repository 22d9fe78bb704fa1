"""Concept checks: five questions about a run that was not seen before, answered by looking.

Example::

    dk.concept_check("01_messages")                 # its picture, and five questions
    check.answer(1, "rank 2")                       # the same in code, counted from 1
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import anywidget
import traitlets

from distkit.errors import DistkitError
from distkit.trace.trace import Trace
from distkit.views import Servers, Timeline
from distkit.views.widget.assets import FORMAT, css, esm
from distkit.views.widget.snapshot import HtmlSnapshot
from distkit_course.predictions import Comparison, Prediction, worded


@dataclass(frozen=True)
class Ask:
    """One question about a trace.

    Args:
        text: the question.
        choices: its possible answers, in any order.
        answer: computes the right one from the trace.
        why: where the picture shows it; is told afterwards.
    """

    text: str
    choices: tuple[object, ...]
    answer: Callable[[Trace], object]
    why: str = ""


@dataclass(frozen=True)
class Concept:
    """The concept check of a lesson.

    Args:
        lesson: its notebook's name.
        about: the program of the run, in a sentence or two.
        trace: makes the run's trace; the same one each time.
        asks: five questions.
        view: draws the trace, bare: sums and notices would answer some of the questions.
    """

    lesson: str
    about: str
    trace: Callable[[], Trace]
    asks: tuple[Ask, ...]
    view: type[Timeline | Servers] = Timeline

    @property
    def answers(self) -> str:
        """What a teacher wants to have at hand: each question, its answer, and why."""
        trace, lines = self.trace(), [self.lesson, self.about]
        for number, ask in enumerate(self.asks, 1):
            right = Prediction(ask.text, ask.choices).compare(ask.answer(trace))  # type: ignore[arg-type]
            lines += [f"{number}. {ask.text}", f"   {right.actual}", f"   {ask.why}"]
        return "\n".join(lines)


class _Form(anywidget.AnyWidget):
    _esm, _css = esm("concept"), css("concept")
    picture = traitlets.Dict().tag(sync=True)


class ConceptCheck:
    """The questions of a concept, to be answered; :func:`concept_check` makes one."""

    def __init__(self, concept: Concept) -> None:
        self.concept, self.trace = concept, concept.trace()
        self.view = concept.view(self.trace, bare=True)
        self._verdicts: dict[int, Comparison] = {}
        self._predictions = [self._prediction(n, ask) for n, ask in enumerate(concept.asks, 1)]
        self._form: _Form | None = None  # once it is shown
        self._still = HtmlSnapshot(self._draw)

    def _prediction(self, number: int, ask: Ask) -> Prediction:
        def judge() -> None:
            self._verdicts[number] = made.compare(ask.answer(self.trace))  # type: ignore[arg-type]
            self._refresh()

        made = Prediction(f"{number}. {ask.text}", ask.choices, committed=judge, why=ask.why)
        return made

    def answer(self, number: int, choice: object) -> Comparison:
        """Answer a question, counted from 1, with one of its choices. Returns the verdict.

        Raises:
            DistkitError: there is no such question or choice, or it has been answered.
        """
        if number not in range(1, len(self._predictions) + 1):
            raise DistkitError(
                f"There is no question {number!r}: they are 1 to {len(self._predictions)}."
            )
        self._predictions[number - 1].commit(choice)  # type: ignore[arg-type]
        return self._verdicts[number]

    def again(self) -> None:
        """Take back the answers that were wrong, to look once more."""
        for number in [n for n, verdict in self._verdicts.items() if not verdict]:
            del self._verdicts[number]
            self._predictions[number - 1] = self._prediction(number, self.concept.asks[number - 1])
        self._refresh()

    @property
    def score(self) -> str:
        """How many of the answers were right."""
        asked, given = len(self._predictions), len(self._verdicts)
        right = sum(map(bool, self._verdicts.values()))
        if given < asked:
            return f"{given} of {asked} questions answered, {right} right"
        verdict = "you can read this picture" if right == asked else "look again at the others"
        return f"{right} of {asked} right: {verdict}"

    # -- how it looks ----------------------------------------------------------------------

    def _picture(self) -> dict[str, object]:
        done = len(self._verdicts) == len(self._predictions)
        return {
            "format": FORMAT,
            "questions": [one._picture() for one in self._predictions],
            "score": self.score,
            "again": done and not all(self._verdicts.values()),
        }

    @property
    def form(self) -> _Form:
        """The widget with the questions."""
        if self._form is None:
            self._form = _Form(picture=self._picture())
            self._form.on_msg(lambda _, said, __: self._heard(said))
        return self._form

    def _heard(self, said: Mapping[str, Any]) -> None:
        if said.get("again"):
            self.again()
        else:
            self._predictions[said["number"]]._entered(str(said["guess"]))
            self._refresh()

    def _refresh(self) -> None:
        if self._form is not None:
            self._form.picture = self._picture()
            self._still.renew()

    def _draw(self) -> tuple[str, str]:
        """HTML and text for where no kernel is: all questions."""
        text = "\n".join([*map(repr, self._predictions), self.score])
        return f'<div style="white-space:pre-line">{worded(text)}</div>', text

    def _ipython_display_(self) -> None:
        from IPython.display import Markdown, display

        display(Markdown(self.concept.about))
        display(self.view)
        self._still.show(*(self.form._repr_mimebundle_() or ({}, {})))

    def __repr__(self) -> str:
        return "\n".join([self.concept.about, self._draw()[1]])


def concept_check(lesson: str) -> ConceptCheck:
    """Show the picture of a run that was not seen before, and ask five questions about it.

    Args:
        lesson: the name of a notebook, such as ``"01_messages"``.

    Raises:
        DistkitError: there is no such check.

    >>> check = concept_check("01_messages")
    >>> check.answer(1, "nobody").words
    'not what you expected'
    >>> check.score
    '1 of 5 questions answered, 0 right'
    """
    from distkit_course.content.quizzes import CONCEPTS  # they are made of the classes above

    if lesson not in CONCEPTS:
        raise DistkitError(f"There is no concept check {lesson!r}. There are: {[*CONCEPTS]}.")
    return ConceptCheck(CONCEPTS[lesson])
