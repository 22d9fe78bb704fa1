"""A guess that is made before a run, and compared with the answer.

Example::

    guess = dk.predict("How many messages does rank 0 send?")
    guess                                 # in a notebook: a field, and Commit; or guess.commit(6)
    run = cluster.run(ring)
    guess.compare(len(sent_by_0))         # the guess, the answer, how far they are apart
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
from distkit.cluster.notebook import cell
from distkit.errors import DistkitError
from distkit.views.widget.assets import FORMAT, css, esm
from distkit.views.widget.snapshot import HtmlSnapshot

#: What can be guessed, and what can be the answer.
Value = float | str | Sequence[float | str]

PASS, CLOSE, FAIL, UNKNOWN = "pass", "close", "fail", "unknown"
_SIGNS = {PASS: "✓", CLOSE: "≈", FAIL: "✗", UNKNOWN: "–"}
_COLOURS = {PASS: "#009e73", CLOSE: "#2b83c6", FAIL: "#d55e00", UNKNOWN: "#7f8c99"}

#: Numbers that differ by less, relative to the answer, are close; ratios up to this, exact.
NEAR, EXACT = 0.1, 1e-9
#: Ratios that have a word.
_TIMES = {2: "twice", 3: "three times", 4: "four times", 10: "ten times"}
#: More items of a list that are wrong are only counted.
MOST_ITEMS = 6

_OVER = "The answer is there already. Run the cell with dk.predict again to guess anew."
_CHOOSE = "Choose one of the answers first."
_NUMBERS = "Type a number in digits, such as 12, or several with commas between them, such as 0, 4."
_TWO = "Type two numbers with a comma between them, such as 5, 7."


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
        return [*yours, ("the answer", self.actual), (_SIGNS[self.status], self.words)]

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
            f"{worded(self.question)}<table style='border:0;margin:2px 0'>{rows}</table></div>"
        )


class _Form(anywidget.AnyWidget):
    _esm, _css = esm("prediction"), css("prediction")
    picture = traitlets.Dict().tag(sync=True)


class Shown(ABC):
    """Something with a form in a notebook, and its text where no kernel is."""

    _widget: type[Any]

    @abstractmethod
    def _picture(self) -> dict[str, object]:
        """What the form shows."""

    @abstractmethod
    def _entered(self, said: Mapping[str, Any]) -> None:
        """Take what a reader has entered."""

    @cached_property
    def form(self) -> Any:
        """The widget, made when it is first shown."""
        made = self._widget(picture=self._picture())
        made.on_msg(lambda _, said, __: self._entered(said))
        return made

    @cached_property
    def _still(self) -> HtmlSnapshot:
        return HtmlSnapshot(self._draw)

    def _refresh(self) -> None:
        if "form" in vars(self):
            self.form.picture = self._picture()
            self._still.renew()

    def _draw(self, text: str = "") -> tuple[str, str]:
        """HTML and text for where no kernel is."""
        text = text or repr(self)
        return f'<div style="white-space:pre-line">{worded(text)}</div>', text

    def _ipython_display_(self) -> None:
        self._still.show(*(self.form._repr_mimebundle_() or ({}, {})))


class Prediction(Shown):
    """A question that waits for a guess, and then for the answer. :func:`predict` makes one."""

    _widget = _Form

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
        self._heard = 0

    def commit(self, guess: Value) -> None:
        """Make the guess, or change it: a number, several numbers, or one of the choices.

        Raises:
            DistkitError: it is none of these; or the answer is there already.
        """
        self._note = ""
        if self._answer is not None:
            raise DistkitError(_OVER)
        if self.choices:
            self.guess = self._chosen(guess, "The guess")
        else:
            self.guess = _formed(guess, self.question)
        self._refresh()
        self._committed()

    def compare(self, actual: Value) -> Comparison:
        """The guess beside the answer; without a guess, the answer.

        Args:
            actual: of the run: a number, words, a list of either, or one of the choices.

        Raises:
            DistkitError: it is none of these.
        """
        actual = self._chosen(actual, "The answer") if self.choices else _plain(actual)
        if self.guess is None:
            said = UNKNOWN, "no guess was committed: next time guess first, it is worth it"
        elif isinstance(actual, str):
            said = _same_words(self.guess, actual)
        else:
            said = _apart(_read(self.guess, actual), actual)
        guess = None if self.guess is None else _shown(self.guess)
        self._answer, self._note = Comparison(self.question, guess, _shown(actual), *said), ""
        self._refresh()
        return self._answer

    def _chosen(self, value: object, what: str) -> str:
        if not (said := _shown(value)):
            raise DistkitError(_CHOOSE)
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
            return "waits", "" if self.guess is None else "Go on: a cell below has the answer."
        if self.guess is None:
            return "waits", _OVER
        answer = self._answer
        words = answer.words if answer else f"the answer: {answer.actual}"
        return answer.status, f"{words}\n{self._why}".strip()

    def _picture(self) -> dict[str, object]:
        status, note = self._state
        return {
            "format": FORMAT,
            "question": self.question,
            "choices": self.choices,
            "guess": "" if self.guess is None else _shown(self.guess),
            "final": self._answer is not None,
            "status": status,
            "note": note,
            "heard": self._heard,  # the same answer again is one, too
        }

    def _entered(self, said: Mapping[str, Any]) -> None:
        try:
            self.commit(str(said["guess"]))
        except DistkitError as error:
            self._note = str(error)
            self._refresh()

    def _refresh(self) -> None:
        self._heard += 1
        super()._refresh()

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

    Until the answer is there the guess can be changed, and a cell that asks again shows it.

    Args:
        question: what will the run say? It has a field for a number or several, and if it has the
            words "two numbers", for two.
        choices: the possible answers, also in words; None for numbers.

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


_GROUPED = re.compile(r"[-+]?\d{1,3}(,\d{3})+(\.\d*)?")
_NUMBER = re.compile(r"[~≈]*([-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?)[%×µa-z]*", re.I)
_DIGITS = 15  # of an integer that a float holds exactly


def _number(word: str) -> float | None:
    """A number as people write it, with its unit.

    >>> _number("1024"), _number("2.5%"), _number("3rd"), _number("many")
    (1024, 2.5, 3, None)
    """
    if (found := _NUMBER.fullmatch(word)) is None:
        return None
    digits = found[1]
    whole = re.fullmatch(r"[-+]?\d+", digits) and len(digits) <= _DIGITS
    return int(digits) if whole else float(digits)


def _readings(guess: Value) -> list[list[float]]:
    """The numbers of a guess; of words in two ways: commas group thousands, or separate numbers.

    >>> _readings("1,024 bytes"), _readings([0, "4 ms"])
    ([[1024], [1, 24]], [[0, 4]])
    """
    if isinstance(guess, int | float):
        return [[guess]]
    if not isinstance(guess, str):
        return [[number for item in guess for number in _readings(item)[0]]]
    words = [word.strip(",") for word in re.split(r"[;\s()\[\]]+", guess)]
    grouped = [word.replace(",", "" if _GROUPED.fullmatch(word) else " ") for word in words]
    apart = [word.replace(",", " ") for word in words]
    return [
        [number for word in " ".join(way).split() if (number := _number(word)) is not None]
        for way in (grouped, apart)
    ]


def _formed(guess: Value, question: str) -> Value:
    """A guess of the form that a question without choices asks for.

    Raises:
        DistkitError: it has no number, or not two where two are asked for.
    """
    if not isinstance(guess, str):
        guess = _plain(guess)
    found = {len(numbers) for numbers in _readings(guess)}
    if "two numbers" in question.casefold() and 2 not in found:
        raise DistkitError(_TWO)
    if found == {0}:
        raise DistkitError(_NUMBERS)
    return guess


def _read(guess: Value, actual: float | Sequence[float | str]) -> list[float]:
    """The numbers of a guess, as many as the answer has, if it can be read so."""
    most = 1 if isinstance(actual, int | float) else len(actual)
    ways = _readings(guess)
    return next((numbers for numbers in ways if len(numbers) == most), ways[0])


def worded(text: str) -> str:
    """A text as HTML: what stands between backticks is code.

    >>> worded("1 < `w`")
    '1 &lt; <code>w</code>'
    """
    return re.sub("`([^`]+)`", r"<code>\1</code>", escape(text))


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


def _apart(guess: list[float], actual: float | Sequence[float | str]) -> tuple[str, str]:
    """The status and the words for the numbers of a guess."""
    rights = [actual] if isinstance(actual, int | float) else list(actual)
    if len(guess) != len(rights):
        return FAIL, f"{count(len(rights), 'number')} in the answer, {len(guess)} in the guess"
    each = [
        _same_words(mine, right) if isinstance(right, str) else _ratio(mine, right)
        for mine, right in zip(guess, rights, strict=True)
    ]
    if isinstance(actual, int | float):
        return each[0]
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
    (('fail', 'twice the answer'), ('fail', '1 too low'))
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
    return status, f"{times} the answer" if ratio > 1 else f"the answer is {times} as much"


def _difference(guess: float, actual: float) -> str:
    more, off = guess > actual, abs(guess - actual)
    if isinstance(guess, int) and isinstance(actual, int):
        return f"{_shown(off)} too {'high' if more else 'low'}"
    if not actual:
        return f"{_shown(off)} {'above' if more else 'below'} the answer"
    percent = 100 * off / abs(actual)
    return f"{_shown(percent)} % {'more' if more else 'less'} than the answer"
