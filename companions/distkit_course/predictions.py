"""Predictions: guesses before a run, which are compared with the answers afterwards.

Example::

    guess = dk.predict("How many messages does rank 0 send?")
    guess                                 # shows a form; or call guess.commit(6)
    run = cluster.run(ring)
    guess.compare(len(sent_by_0))         # shows the guess, the answer and their difference
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from typing import Any

import anywidget
import traitlets

from distkit._format import count
from distkit.cluster.notebook import running_cell_id
from distkit.errors import DistkitError
from distkit.views.widget.assets import css, esm
from distkit.views.widget.snapshot import HtmlSnapshot

#: The type of guesses and answers.
Value = float | str | Sequence[float | str]

PASS, CLOSE, FAIL, UNKNOWN = "pass", "close", "fail", "unknown"
_SIGNS = {PASS: "✓", CLOSE: "≈", FAIL: "✗", UNKNOWN: ""}
_COLORS = {PASS: "#009e73", CLOSE: "#2b83c6", FAIL: "#d55e00", UNKNOWN: "#7f8c99"}

#: Relative differences up to which a guess is close (NEAR) or exact (EXACT).
NEAR, EXACT = 0.1, 1e-9
#: Names of ratios.
_RATIO_NAMES = {2: "twice", 3: "three times", 4: "four times", 10: "ten times"}
#: Maximum number of wrong items of a list to show; the rest are only counted.
MAX_ITEMS = 6

_TOO_LATE = "The answer is already known. Run the question's cell again for a new guess."
_CHOICE_NEEDED = "Select one of the answers first."
_NUMBER_NEEDED = (
    "Enter a number in digits, such as 12, or several separated by commas, such as 0, 4."
)
_TWO_NEEDED = "Enter two numbers separated by a comma, such as 5, 7."


@dataclass(frozen=True)
class Comparison:
    """The comparison of a guess with the answer. It is true if the guess is right.

    ``status`` is "pass", "close" (all numbers within 10%), "fail" or "unknown" (no guess).
    """

    question: str
    guess: str | None
    actual: str
    status: str
    message: str

    def __bool__(self) -> bool:
        return self.status == PASS

    def _rows(self) -> list[tuple[str, str]]:
        guess = [] if self.guess is None else [("your guess", self.guess)]
        return [*guess, ("the answer", self.actual), (_SIGNS[self.status], self.message)]

    def __repr__(self) -> str:
        lines = (f"  {name:12}  {value}".rstrip() for name, value in self._rows())
        return "\n".join([self.question, *(line.replace("\n", f"\n{'':16}") for line in lines)])

    def _repr_html_(self) -> str:
        """Return the comparison as HTML."""
        color = _COLORS[self.status]
        cells = [
            *((name, value, "inherit") for name, value in self._rows()[:-1]),
            ("verdict", f"{_SIGNS[self.status]} {self.message}".strip(), color),
        ]
        parts = "".join(
            f'<div><div style="font-size:12px;opacity:.75">{escape(name)}</div>'
            '<b style="font-size:15px;white-space:pre-line;overflow-wrap:anywhere;'
            f'color:{ink}">{escape(value)}</b></div>'
            for name, value, ink in cells
        )
        return (
            f'<div style="border-left:4px solid {color};margin-top:8px;padding:4px 14px;font:var('
            '--jp-ui-font-size1,13px)/1.45 var(--jp-ui-font-family,sans-serif)">'
            f"{code_html(self.question)}"
            f'<div style="display:flex;flex-wrap:wrap;gap:4px 32px">{parts}</div></div>'
        )


class _Form(anywidget.AnyWidget):
    _esm, _css = esm("prediction"), css("prediction")
    picture = traitlets.Dict().tag(sync=True)


class StaticForm(ABC):
    """A form in a notebook, with static text for documents without a kernel."""

    _widget: type[Any]

    @abstractmethod
    def _picture(self) -> dict[str, object]:
        """Return the state of the form."""

    @abstractmethod
    def _submit(self, message: Mapping[str, Any]) -> None:
        """Handle a message from the form."""

    @cached_property
    def form(self) -> Any:
        """The widget, created when it is first shown."""
        widget = self._widget(picture=self._picture())
        widget.on_msg(lambda _, message, __: self._submit(message))
        return widget

    @cached_property
    def _snapshot(self) -> HtmlSnapshot:
        return HtmlSnapshot(self._draw)

    def _refresh(self) -> None:
        if "form" in vars(self):
            self.form.picture = self._picture()
            self._snapshot.refresh()

    def _draw(self, text: str = "") -> tuple[str, str]:
        """Return HTML and text for documents without a kernel."""
        text = text or repr(self)
        return f'<div style="white-space:pre-line">{code_html(text)}</div>', text

    def _ipython_display_(self) -> None:
        self._snapshot.show(*(self.form._repr_mimebundle_() or ({}, {})))


class Prediction(StaticForm):
    """A question with its guess and answer, created by :func:`predict`."""

    _widget = _Form

    def __init__(
        self,
        question: str,
        choices: Sequence[object] = (),
        on_commit: Callable[[], object] = lambda: None,
        why: str = "",
    ) -> None:
        self.question, self.choices = question, [_format(c) for c in choices]
        self.guess: Value | None = None
        self._on_commit, self._why, self._note = on_commit, why, ""
        self._answer: Comparison | None = None
        self._submissions = 0

    def commit(self, guess: Value) -> None:
        """Set or change the guess: a number, several numbers, or one of the choices.

        Raises:
            DistkitError: the guess is none of these, or the answer is already known.
        """
        self._note = ""
        if self._answer is not None:
            raise DistkitError(_TOO_LATE)
        if self.choices:
            self.guess = self._choice(guess, "The guess")
        else:
            self.guess = _validate(guess, self.question)
        self._refresh()
        self._on_commit()

    def compare(self, actual: Value, unit: str = "") -> Comparison:
        """Compare the guess with the answer.

        Args:
            actual: the answer: a number, a string, a list of these, or one of the choices.
            unit: the unit of the answer, to be shown after it.

        Raises:
            DistkitError: the answer is none of these.
        """
        actual = self._choice(actual, "The answer") if self.choices else _plain(actual)
        if self.guess is None:
            verdict = UNKNOWN, "no guess; commit one before the next run"
        elif isinstance(actual, str):
            verdict = _compare_text(self.guess, actual)
        else:
            verdict = _compare_numbers(_best_reading(self.guess, actual), actual)
        guess, answer = (
            None if self.guess is None else _format(self.guess),
            f"{_format(actual)} {unit}".replace(" %", "%").rstrip(),
        )
        self._answer, self._note = Comparison(self.question, guess, answer, *verdict), ""
        self._refresh()
        return self._answer

    def _choice(self, value: object, label: str) -> str:
        if not (text := _format(value)):
            raise DistkitError(_CHOICE_NEEDED)
        matches = [c for c in self.choices if _normalize(c) == _normalize(text)]
        if not matches:
            raise DistkitError(
                f"{label} {text!r} is not one of the choices: {_join(self.choices)}."
            )
        return matches[0]

    # -- display -------------------------------------------------------------------------

    @property
    def _state(self) -> tuple[str, str]:
        """The status, and a note for the reader."""
        if self._note:
            return "refused", self._note
        if self._answer is None:
            return "waits", "" if self.guess is None else "Continue: a cell below has the answer."
        if self.guess is None:
            return "waits", _TOO_LATE
        answer = self._answer
        message = answer.message if answer else f"the answer: {answer.actual}"
        return answer.status, f"{message}\n{self._why}".strip()

    def _picture(self) -> dict[str, object]:
        status, note = self._state
        return {
            "question": self.question,
            "choices": self.choices,
            "guess": "" if self.guess is None else _format(self.guess),
            "final": self._answer is not None,
            "status": status,
            "note": note,
            "submissions": self._submissions,  # so that a repeated guess also updates the form
        }

    def _submit(self, message: Mapping[str, Any]) -> None:
        try:
            self.commit(str(message["guess"]))
        except DistkitError as error:
            self._note = str(error)
            self._refresh()

    def _refresh(self) -> None:
        self._submissions += 1
        super()._refresh()

    def __repr__(self) -> str:
        choices = f" ({_join(self.choices)})" if self.choices else ""
        if self.guess is None:
            guess = ".commit(…)" if self._answer is None else "none"
            return f"{self.question}{choices}\n  your guess: {guess}"
        guess = f"{_format(self.guess)}  {self._state[1]}".rstrip()
        return f"{self.question}{choices}\n  your guess: {guess}"


_predictions: dict[object, Prediction] = {}


def predict(question: str, choices: Sequence[object] | None = None) -> Prediction:
    """Ask for a guess before a run; a notebook shows a field or the choices, and a Commit button.

    The guess can be changed until the answer is known; until then, running the cell again keeps it.

    Args:
        question: the question. Without choices, it asks for one or more numbers, or for two if
            it contains the words "two numbers".
        choices: the possible answers, numbers or strings; None for any number.

    Raises:
        DistkitError: there are fewer than two choices, or two are the same.

    >>> guess = predict("How many messages does rank 0 send?")
    >>> guess.commit(6)
    >>> guess.compare(3)
    How many messages does rank 0 send?
      your guess    6
      the answer    3
      ✗             twice the answer
    """
    options = [_format(c) for c in choices or ()]
    if choices is not None and len({*map(_normalize, options)}) < max(2, len(options)):
        raise DistkitError(f"{question!r} needs two or more different choices; got {options}.")
    prediction, cell_id = Prediction(question, options), running_cell_id()
    if cell_id is None:
        return prediction
    key: object = (cell_id, question, *options)
    existing = _predictions.get(key)
    if existing is None or existing.guess is None or existing._answer is not None:
        _predictions[key] = prediction
    return _predictions[key]


# -- values --------------------------------------------------------------------------------


def _plain(value: Any) -> Value:
    """Convert numpy and torch values to plain Python.

    Raises:
        DistkitError: the value is not a number, a string, or a list of these.
    """
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, bool):
        return _format(value)
    if isinstance(value, str):
        if value.strip():
            return value
    elif isinstance(value, int | float):
        return value
    elif isinstance(value, list | tuple | range) and value:
        items = [_plain(item) for item in value]
        if all(isinstance(item, int | float | str) for item in items):
            return items  # type: ignore[return-value]
    raise DistkitError(
        f"{value!r} ({type(value).__name__}) cannot be compared. "
        "Pass a number, a string, or a list of these."
    )


_GROUPED = re.compile(r"[-+]?\d{1,3}(,\d{3})+(\.\d*)?")
_NUMBER = re.compile(r"[~≈]*([-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?)[%×µa-z]*", re.I)
_DIGITS = 15  # a float represents integers of up to this many digits exactly


def _number(word: str) -> float | None:
    """Parse a number with an optional unit.

    >>> _number("1024"), _number("2.5%"), _number("3rd"), _number("many")
    (1024, 2.5, 3, None)
    """
    if (match := _NUMBER.fullmatch(word)) is None:
        return None
    digits = match[1]
    is_integer = re.fullmatch(r"[-+]?\d+", digits) and len(digits) <= _DIGITS
    return int(digits) if is_integer else float(digits)


def _readings(guess: Value) -> list[list[float]]:
    """Return the numbers in a guess, with commas read as part of numbers or as separators.

    >>> _readings("1,024 bytes"), _readings([0, "4 ms"])
    ([[1024], [1, 24]], [[0, 4]])
    """
    if isinstance(guess, int | float):
        return [[guess]]
    if not isinstance(guess, str):
        return [[number for item in guess for number in _readings(item)[0]]]
    words = [word.strip(",") for word in re.split(r"[;\s()\[\]]+", guess)]
    grouped = [word.replace(",", "" if _GROUPED.fullmatch(word) else " ") for word in words]
    separated = [word.replace(",", " ") for word in words]
    return [
        [number for word in " ".join(words).split() if (number := _number(word)) is not None]
        for words in (grouped, separated)
    ]


def _validate(guess: Value, question: str) -> Value:
    """Return a valid guess for a question without choices.

    Raises:
        DistkitError: the guess contains no number, or not two if the question asks for two.
    """
    if not isinstance(guess, str):
        guess = _plain(guess)
    counts = {len(numbers) for numbers in _readings(guess)}
    if "two numbers" in question.casefold() and 2 not in counts:
        raise DistkitError(_TWO_NEEDED)
    if counts == {0}:
        raise DistkitError(_NUMBER_NEEDED)
    return guess


def _best_reading(guess: Value, actual: float | Sequence[float | str]) -> list[float]:
    """Return the reading of a guess with as many numbers as the answer, or the first reading."""
    length = 1 if isinstance(actual, int | float) else len(actual)
    readings = _readings(guess)
    return next((numbers for numbers in readings if len(numbers) == length), readings[0])


def code_html(text: str) -> str:
    """Convert text to HTML; text between backticks is code.

    >>> code_html("1 < `w`")
    '1 &lt; <code>w</code>'
    """
    return re.sub("`([^`]+)`", r"<code>\1</code>", escape(text))


def _format(value: object) -> str:
    """Format a value for readers.

    >>> _format(12345), _format(2 / 3), _format([1, 2]), _format(True)
    ('12,345', '0.667', '1, 2', 'yes')
    """
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    if isinstance(value, str):
        return value.strip()
    return ", ".join(map(_format, value)) if isinstance(value, list | tuple | range) else str(value)


def _normalize(text: str) -> str:
    return " ".join(text.split()).casefold()


def _join(choices: Sequence[str]) -> str:
    return " · ".join(choices)


# -- comparison -----------------------------------------------------------------------------


def _compare_text(guess: Value, actual: Value) -> tuple[str, str]:
    if _normalize(_format(guess)) == _normalize(_format(actual)):
        return PASS, "exactly right"
    return FAIL, "not what you expected"


def _compare_numbers(guess: list[float], actual: float | Sequence[float | str]) -> tuple[str, str]:
    """Return the status of a guess with these numbers, and a description."""
    expected = [actual] if isinstance(actual, int | float) else list(actual)
    if len(guess) != len(expected):
        return FAIL, f"{count(len(expected), 'number')} in the answer, {len(guess)} in the guess"
    results = [
        _compare_text(number, right) if isinstance(right, str) else _ratio(number, right)
        for number, right in zip(guess, expected, strict=True)
    ]
    if isinstance(actual, int | float):
        return results[0]
    wrong = [n for n, (status, _) in enumerate(results) if status != PASS]
    if not wrong:
        return PASS, "exactly right"
    lines = [f"[{n}] {_format(guess[n])}: {results[n][1]}" for n in wrong[:MAX_ITEMS]]
    omitted = [f"and {len(wrong) - MAX_ITEMS} more"] * (len(wrong) > MAX_ITEMS)
    status = CLOSE if all(status in (PASS, CLOSE) for status, _ in results) else FAIL
    score = len(results) - len(wrong)
    return status, "\n".join([f"{score} of {len(results)} are right", *lines, *omitted])


def _ratio(guess: float, actual: float) -> tuple[str, str]:
    """Return the status of a guess and describe its ratio to the answer.

    A guess is right if it equals the answer as displayed.

    >>> _ratio(6, 3), _ratio(5, 6), _ratio(16, 15.997)
    (('fail', 'twice the answer'), ('fail', '1 too low'), ('pass', 'exactly right'))
    """
    if math.isclose(guess, actual, rel_tol=EXACT) or _format(guess) == _format(actual):
        return PASS, "exactly right"
    ratio = guess / actual if actual else 0.0
    factor = max(ratio, 1 / ratio) if ratio > 0 else math.inf
    status = CLOSE if abs(guess - actual) <= NEAR * abs(actual) else FAIL
    if not factor >= 1.5 or not math.isfinite(factor):
        return status, _difference(guess, actual)
    nearest = round(factor)
    exact = math.isclose(factor, nearest, rel_tol=EXACT)
    has_name = nearest in _RATIO_NAMES and math.isclose(factor, nearest, rel_tol=0.05)
    times = (
        f"{'' if exact else 'about '}{_RATIO_NAMES[nearest]}"
        if has_name
        else f"{_format(factor)} times"
    )
    return status, f"{times} the answer" if ratio > 1 else f"the answer is {times} as much"


def _difference(guess: float, actual: float) -> str:
    above, distance = guess > actual, abs(guess - actual)
    if isinstance(guess, int) and isinstance(actual, int):
        return f"{_format(distance)} too {'high' if above else 'low'}"
    if not actual:
        return f"{_format(distance)} {'above' if above else 'below'} the answer"
    percent = 100 * distance / abs(actual)
    return f"{_format(percent)}% {'more' if above else 'less'} than the answer"
