"""A concept check: the picture of a run that was not seen before, and questions about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from typing import Any

from distkit.errors import DistkitError
from distkit.exercises.predictions import Comparison, Prediction
from distkit.trace.trace import Trace
from distkit.views import Timeline


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
        view: draws the trace.
    """

    lesson: str
    about: str
    trace: Callable[[], Trace]
    asks: tuple[Ask, ...]
    view: Callable[[Trace], Any] = Timeline

    @property
    def answers(self) -> str:
        """What a teacher wants to have at hand: each question, its answer, and why."""
        trace, lines = self.trace(), [self.lesson, self.about]
        for number, ask in enumerate(self.asks, 1):
            right = Prediction(ask.text, ask.choices).compare(ask.answer(trace))  # type: ignore[arg-type]
            lines += [f"{number}. {ask.text}", f"   {right.actual}", f"   {ask.why}"]
        return "\n".join(lines)


class ConceptCheck:
    """The questions of a concept, to be answered; :func:`concept_check` makes one."""

    def __init__(self, concept: Concept) -> None:
        self.concept, self.trace = concept, concept.trace()
        self._handle: Any = None  # of the score, once it is shown
        self._verdicts: dict[int, Comparison] = {}
        self._predictions = [self._prediction(n, ask) for n, ask in enumerate(concept.asks, 1)]

    def _prediction(self, number: int, ask: Ask) -> Prediction:
        def judge() -> None:
            self._verdicts[number] = made.compare(ask.answer(self.trace))  # type: ignore[arg-type]
            if self._handle is not None:
                self._handle.update(self._bundle(), raw=True)

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

    @property
    def score(self) -> str:
        """How many of the answers were right."""
        asked, given = len(self._predictions), len(self._verdicts)
        right = sum(map(bool, self._verdicts.values()))
        if given < asked:
            return f"{given} of {asked} questions answered, {right} right"
        verdict = "you can read this picture" if right == asked else "read the picture once more"
        return f"{right} of {asked} right: {verdict}"

    def _bundle(self) -> dict[str, str]:
        return {"text/plain": self.score, "text/html": f"<b>{escape(self.score)}</b>"}

    def _ipython_display_(self) -> None:
        from IPython.display import Markdown, display

        display(Markdown(self.concept.about))
        display(self.concept.view(self.trace))
        for one in self._predictions:
            display(one)
        self._handle = display(self._bundle(), raw=True, display_id=True)

    def __repr__(self) -> str:
        return "\n".join([self.concept.about, *map(repr, self._predictions), self.score])
