"""A guess that is made before a run, and compared with what the run says.

Example::

    guess = dk.predict("How many messages does rank 0 send?")
    guess                                 # in a notebook: a field, and Commit; or guess.commit(6)
    run = cluster.run(ring)
    guess.compare(len(sent_by_0))         # the guess, what the run says, how far they are apart
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import anywidget
import traitlets

from distkit.cluster.notebook import cell
from distkit.errors import DistkitError
from distkit.views.widget.assets import FORMAT, css, esm
from distkit.views.widget.snapshot import HtmlSnapshot

#: What can be guessed, and what a run can answer.
Value = float | str | Sequence[float | str]

PASS, CLOSE, FAIL, UNKNOWN = "pass", "close", "fail", "unknown"
_SIGNS = {PASS: "✓", CLOSE: "≈", FAIL: "✗", UNKNOWN: "–"}
_COLOURS = {PASS: "#009e73", CLOSE: "#0072b2", FAIL: "#d55e00", UNKNOWN: "#7f8c99"}

#: Numbers that differ by less, relative to the run's, are close; ratios up to this, exact.
NEAR, EXACT = 0.1, 1e-9
#: Ratios that have a word.
_TIMES = {2: "twice", 3: "three times", 4: "four times", 10: "ten times"}
#: More items of a list that are wrong are only counted.
MOST_ITEMS = 6

_OVER = "The run has answered already. Run the cell with dk.predict again to guess anew."


@dataclass(frozen=True)
class Comparison:
    """A guess beside the answer; true when they are equal.

    ``status`` is "pass", "close" (a number within 10 %), "fail" or "unknown" (nobody guessed).
    """

    question: str
    guess: str | None
    actual: str
    status: str
    words: str

    def __bool__(self) -> bool:
        return self.status == PASS

    def _rows(self) -> list[tuple[str, str]]:
        yours = [] if self.guess is None else [("your guess", self.guess)]
        return [*yours, ("the run says", self.actual), (_SIGNS[self.status], self.words)]

    def __repr__(self) -> str:
        lines = (f"  {name:12}  {said}".rstrip() for name, said in self._rows())
        return "\n".join([self.question, *(line.replace("\n", f"\n{'':16}") for line in lines)])

    def _repr_html_(self) -> str:
        """The same for a notebook."""
        colour = _COLOURS[self.status]
        cell = "padding:1px 14px 1px 0;text-align:left;vertical-align:top"
        rows = "".join(
            f'<tr style="background:none"><td style="{cell};white-space:nowrap">{escape(name)}</td>'
            f'<td style="{cell};white-space:pre-line;overflow-wrap:anywhere"><b>{escape(said)}</b>'
            "</td></tr>"
            for name, said in self._rows()
        )
        return (
            f'<div style="border-left:4px solid {colour};padding:4px 14px;font:var('
            '--jp-ui-font-size1,13px)/1.45 var(--jp-ui-font-family,sans-serif)">'
            f"{escape(self.question)}<table style='border:0;margin:2px 0'>{rows}</table></div>"
        )


class _Form(anywidget.AnyWidget):
    _esm, _css = esm("prediction"), css("prediction")
    picture = traitlets.Dict().tag(sync=True)


class Prediction:
    """A question that waits for a guess, and then for a run. :func:`predict` makes one."""

    def __init__(
        self,
        question: str,
        choices: Sequence[object] = (),
        committed: Callable[[], object] = lambda: None,
        why: str = "",
    ) -> None:
        self.question, self.choices = question, [_shown(c) for c in choices]
        self.guess: Value | None = None
        self._committed, self._why, self._note = committed, why, ""
        self._answer: Comparison | None = None
        self._form: _Form | None = None  # once it is shown
        self._heard = 0
        self._still = HtmlSnapshot(self._draw)

    def commit(self, guess: Value) -> None:
        """Make the guess: a number, words, a list of either, or one of the choices.

        Raises:
            DistkitError: it is none of these; there is a guess already, or the run has answered.
        """
        if self._answer is not None:
            raise DistkitError(_OVER)
        if self.guess is not None:
            raise DistkitError(
                f"You have committed {_shown(self.guess)} and the guess stays as it is. "
                "Run the cell with dk.predict again to guess anew."
            )
        self.guess = self._chosen(guess, "The guess") if self.choices else _plain(guess)
        self._refresh()
        self._committed()

    def compare(self, actual: Value) -> Comparison:
        """The guess beside what the run says; without a guess, what the run says.

        Args:
            actual: of the run: a number, words, a list of either, or one of the choices.

        Raises:
            DistkitError: it is none of these, or of another kind than the guess.
        """
        actual = self._chosen(actual, "The answer") if self.choices else _plain(actual)
        if self.guess is None:
            said = UNKNOWN, "no guess was committed: next time guess first, it is worth it"
        elif self.choices or isinstance(actual, str):
            said = _same_words(self.guess, actual)
        else:
            said = _apart(_read(self.guess, actual), actual)
        guess = None if self.guess is None else _shown(self.guess)
        self._answer = Comparison(self.question, guess, _shown(actual), *said)
        self._refresh()
        return self._answer

    def _chosen(self, value: object, what: str) -> str:
        said = _shown(value)
        found = [c for c in self.choices if _folded(c) == _folded(said)]
        if not found:
            raise DistkitError(f"{what} {said!r} is none of the choices: {_listed(self.choices)}.")
        return found[0]

    # -- how it looks ----------------------------------------------------------------------

    @property
    def _state(self) -> tuple[str, str]:
        """A status, and what is to be said."""
        if self._note:
            return "refused", self._note
        if self._answer is None:
            return "waits", "" if self.guess is None else "Go on: the run answers."
        if self.guess is None:
            return "waits", _OVER
        answer = self._answer
        words = answer.words if answer else f"the run says {answer.actual}"
        return answer.status, f"{words}\n{self._why}".strip()

    def _picture(self) -> dict[str, object]:
        status, note = self._state
        return {
            "format": FORMAT,
            "question": self.question,
            "choices": self.choices,
            "guess": "" if self.guess is None else _shown(self.guess),
            "open": self.guess is None and self._answer is None,
            "status": status,
            "note": note,
            "heard": self._heard,  # the same answer again is one, too
        }

    @property
    def form(self) -> _Form:
        """The widget."""
        if self._form is None:
            self._form = _Form(picture=self._picture())
            self._form.on_msg(lambda _, said, __: self._entered(str(said["guess"])))
        return self._form

    def _entered(self, guess: str) -> None:
        try:
            self.commit(guess)
        except DistkitError as error:
            self._note = str(error)
            self._refresh()

    def _refresh(self) -> None:
        self._heard += 1
        if self._form is not None:
            self._form.picture = self._picture()
            self._still.renew()
        self._note = ""

    def _draw(self) -> tuple[str, str]:
        """HTML and text for where no kernel is."""
        text = repr(self)
        return f'<div style="white-space:pre-line">{escape(text)}</div>', text

    def _ipython_display_(self) -> None:
        self._still.show(*(self.form._repr_mimebundle_() or ({}, {})))

    def __repr__(self) -> str:
        among = f" ({_listed(self.choices)})" if self.choices else ""
        if self.guess is None:
            given = ".commit(…)" if self._answer is None else "none"
            return f"{self.question}{among}\n  your guess: {given}"
        said = f"{_shown(self.guess)}  {self._state[1]}".rstrip()
        return f"{self.question}{among}\n  your guess: {said}"


_asked: dict[object, Prediction] = {}


def predict(question: str, choices: Sequence[object] | None = None) -> Prediction:
    """Ask for a guess before a run. In a notebook it shows a field or the choices, and Commit.

    A cell that asks again before the run has answered shows the guess that was committed.

    Args:
        question: what will the run say?
        choices: the possible answers; None for a number, words, or a list of either.

    Raises:
        DistkitError: there are fewer than two choices, or two are the same.

    >>> guess = predict("How many messages does rank 0 send?")
    >>> guess.commit(6)
    >>> guess.compare(3)
    How many messages does rank 0 send?
      your guess    6
      the run says  3
      ✗             twice what the run says
    """
    offered = [_shown(c) for c in choices or ()]
    if choices is not None and len({*map(_folded, offered)}) < max(2, len(offered)):
        raise DistkitError(f"{question!r} needs two or more different choices; got {offered}.")
    made, here = Prediction(question, offered), cell()
    if here is None:
        return made
    key: object = (here, question, *offered)
    before = _asked.get(key)
    if before is None or before.guess is None or before._answer is not None:
        _asked[key] = made
    return _asked[key]


# -- values --------------------------------------------------------------------------------


def _plain(value: Any) -> Value:
    """A value without the classes of numpy and torch.

    Raises:
        DistkitError: it is neither a number nor words nor a list of either.
    """
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, bool):
        return _shown(value)
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
        "Give a number, words, or a list of either."
    )


_NUMBER = re.compile(r"[-+]?(\d{1,3}(,\d{3})+|\d+)?(\.\d+|\.)?(e[-+]?\d+)?", re.I)


def _number(text: str) -> float | None:
    """A number as people write it, with commas for thousands and words after it.

    >>> _number("1,024"), _number("6 messages"), _number("2.5 %"), _number("many")
    (1024, 6, 2.5, None)
    """
    first = text.split()[0].rstrip("%x×")
    if not _NUMBER.fullmatch(first) or not re.search(r"\d", first):
        return None
    digits = first.replace(",", "")
    return int(digits) if re.fullmatch(r"[-+]?\d+", digits) else float(digits)


def _read(guess: Value, actual: Value) -> Value:
    """A guess as a value of the answer's kind.

    Raises:
        DistkitError: it cannot be read as one.
    """
    if isinstance(actual, int | float):
        found = _number(guess) if isinstance(guess, str) else guess
        if isinstance(found, int | float):
            return found
        raise DistkitError(
            f"The run says {_shown(actual)}, a number, and the guess is {_shown(guess)!r}. "
            "Run the cell with dk.predict again and guess a number."
        )
    items = re.split(r"[,;\s]+", guess.strip("[]() \t")) if isinstance(guess, str) else guess
    if isinstance(items, int | float) or len(items) != len(actual):
        raise DistkitError(
            f"The run says {_shown(actual)}, a list of {len(actual)}, and the guess is "
            f"{_shown(guess)!r}. Run the cell with dk.predict again and guess {len(actual)} items."
        )
    return [
        item if isinstance(right, str) else _read(item, right)  # type: ignore[misc]
        for item, right in zip(items, actual, strict=True)
    ]


def _shown(value: object) -> str:
    """A value as people read it.

    >>> _shown(12345), _shown(2 / 3), _shown([1, 2]), _shown(True)
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
    return ", ".join(map(_shown, value)) if isinstance(value, list | tuple | range) else str(value)


def _folded(text: str) -> str:
    return " ".join(text.split()).casefold()


def _listed(choices: Sequence[str]) -> str:
    return " · ".join(choices)


# -- how far apart ---------------------------------------------------------------------------


def _same_words(guess: Value, actual: Value) -> tuple[str, str]:
    if _folded(_shown(guess)) == _folded(_shown(actual)):
        return PASS, "exactly right"
    return FAIL, "not what you expected"


def _apart(guess: Any, actual: Any) -> tuple[str, str]:
    """The status and the words for a guess of the answer's kind."""
    if isinstance(actual, str):
        return _same_words(guess, actual)
    if isinstance(actual, int | float):
        return _ratio(guess, actual)
    each = [_apart(*both) for both in zip(guess, actual, strict=True)]
    wrong = [n for n, (status, _) in enumerate(each) if status != PASS]
    if not wrong:
        return PASS, "exactly right"
    lines = [f"[{n}] {_shown(guess[n])}: {each[n][1]}" for n in wrong[:MOST_ITEMS]]
    more = [f"and {len(wrong) - MOST_ITEMS} more"] * (len(wrong) > MOST_ITEMS)
    right = f"{len(each) - len(wrong)} of {len(each)} are right"
    close = all(status in (PASS, CLOSE) for status, _ in each)
    return CLOSE if close else FAIL, "\n".join([right, *lines, *more])


def _ratio(guess: float, actual: float) -> tuple[str, str]:
    """The same for two numbers.

    >>> _ratio(6, 3), _ratio(5, 6)
    (('fail', 'twice what the run says'), ('fail', '1 too low'))
    """
    if math.isclose(guess, actual, rel_tol=EXACT):
        return PASS, "exactly right"
    ratio = guess / actual if actual else 0.0
    large = max(ratio, 1 / ratio) if ratio > 0 else math.inf
    status = CLOSE if abs(guess - actual) <= NEAR * abs(actual) else FAIL
    if not large >= 1.5 or not math.isfinite(large):
        return status, _difference(guess, actual)
    nearest = round(large)
    exact = math.isclose(large, nearest, rel_tol=EXACT)
    named = nearest in _TIMES and math.isclose(large, nearest, rel_tol=0.05)
    times = f"{'' if exact else 'about '}{_TIMES[nearest]}" if named else f"{_shown(large)} times"
    return status, f"{times} what the run says" if ratio > 1 else f"the run says {times} as much"


def _difference(guess: float, actual: float) -> str:
    more, off = guess > actual, abs(guess - actual)
    if isinstance(guess, int) and isinstance(actual, int):
        return f"{_shown(off)} too {'high' if more else 'low'}"
    if not actual:
        return f"{_shown(off)} {'above' if more else 'below'} what the run says"
    percent = 100 * off / abs(actual)
    return f"{_shown(percent)} % {'more' if more else 'less'} than the run says"
