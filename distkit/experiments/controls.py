"""From abbreviations to ipywidgets' controls, as in ``ipywidgets.interact``; what they allow."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import ipywidgets

from distkit.views.scene.units import human_bytes

#: What an experiment does itself, and does not hand to the function.
RANKS, STRAGGLER = "ranks", "straggler"
OWN = {RANKS: "how many ranks run it", STRAGGLER: "seconds that the last rank loses"}
#: Parameters of the function whose range reads best in powers: of two with units, of ten.
BYTES, LOGARITHMIC = ("size", "nbytes"), ("lr", "learning_rate")

EMPTY = inspect.Parameter.empty


@dataclass(frozen=True)
class Control:
    """A widget, and the values that it allows: a range, or choices, or any."""

    name: str
    widget: Any
    low: float = -math.inf
    high: float = math.inf
    choices: tuple[Any, ...] = ()
    digits: int | None = None  # the readout's, on a logarithmic scale
    ours: bool = True  # else the reader's own widget, which stays as it is

    @property
    def value(self) -> Any:
        """What it stands at, as its readout says."""
        value = self.widget.value
        return value if self.digits is None else float(f"{value:.{self.digits}g}")

    def check(self, value: Any) -> None:
        """Raise ValueError when the control does not allow a value, which says what it does."""
        if self.choices:
            if not any(value is c or value == c for c in self.choices):
                known = ", ".join(map(said, self.choices))
                raise ValueError(f"{self.name}={said(value)} is none of its choices: {known}.")
        elif self.low > -math.inf and not self._within(value):
            whole = "whole numbers " if self._whole else ""
            raise ValueError(
                f"{self.name}={said(value)} is outside its control: {whole}"
                f"{said(self.low)} to {said(self.high)}. Make its range wider."
            )

    def start_at(self, value: Any) -> None:
        """Have the widget stand at a value that the control allows."""
        if isinstance(self.widget, ipywidgets.SelectionSlider):
            self.widget.options = _sizes({*(n for _, n in self.widget.options), value})
        self.widget.value = value

    @property
    def _whole(self) -> bool:
        return isinstance(self.low, Integral) and isinstance(self.high, Integral)

    def _within(self, value: Any) -> bool:
        number = isinstance(value, Integral if self._whole else Real)
        return number and not isinstance(value, bool) and bool(self.low <= value <= self.high)


def said(value: Any) -> str:
    """A parameter's value in a sentence, a table, a legend.

    >>> said(0.1 + 0.2), said(print), said("ring")
    ('0.3', 'print', 'ring')
    """
    if isinstance(value, float):
        return f"{value:.6g}"
    return str(getattr(value, "__name__", value))


def parameters(fn: Callable[..., Any]) -> dict[str, Any]:
    """The function's parameters and their defaults, EMPTY for none; ``**`` if it takes any.

    Raises:
        TypeError: it is no function, or takes what has no name.
    """
    if not callable(fn):
        raise TypeError(f"an experiment runs a function on ranks, not {fn!r}: dk.Experiment(train)")
    found = {}
    for p in inspect.signature(fn).parameters.values():
        if p.kind is p.VAR_KEYWORD:
            found["**"] = p
        elif p.kind is p.POSITIONAL_ONLY or p.kind is p.VAR_POSITIONAL:
            raise TypeError(f"{named(fn)}: {p} has no name to set it by. Use named parameters.")
        elif p.name in OWN:
            raise TypeError(
                f"{named(fn)} has a parameter {p.name}, which an experiment sets itself: "
                f"{OWN[p.name]}. Give it another name; ranks can ask dist.get_world_size()."
            )
        else:
            found[p.name] = p.default
    return found


def named(fn: Callable[..., Any]) -> str:
    """A function in a sentence."""
    return f"{getattr(fn, '__name__', type(fn).__name__)}()"


def make(name: str, abbreviation: Any, default: Any = EMPTY) -> Control:
    """The control of one parameter, at its default.

    Args:
        name: the parameter.
        abbreviation: (low, high) or (low, high, step), a list or dict of choices, a bool, text,
            or a widget.
        default: where it stands at first; a range's middle if EMPTY.

    Raises:
        ValueError: the range is empty, or the default outside.
        TypeError: there is no control for such a thing.
    """
    try:
        control = _made(name, abbreviation)
    except Exception as error:  # ipywidgets and traitlets raise all kinds
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(
            f"{name}={abbreviation!r} makes no control: {error} A control is a range (8, 128), "
            'choices ["ring", "gloo"], True or False, a text, or a widget.'
        ) from None
    if default is EMPTY or isinstance(abbreviation, ipywidgets.Widget):
        return control
    try:
        control.check(default)
    except ValueError as error:
        raise ValueError(f"{name} begins at the function's default, and {error}") from None
    control.start_at(default)
    return control


def _made(name: str, abbreviation: Any) -> Control:
    if isinstance(abbreviation, ipywidgets.Widget):
        return _of_widget(name, abbreviation)
    if isinstance(abbreviation, tuple):
        return _range(name, abbreviation)
    if isinstance(abbreviation, Mapping):
        pairs = list(abbreviation.items())
    elif isinstance(abbreviation, Iterable) and not isinstance(abbreviation, str):
        pairs = [(said(value), value) for value in abbreviation]
    else:
        return Control(name, _interact(name, abbreviation))
    if not pairs:
        raise ValueError("there is nothing to choose from.")
    widget = ipywidgets.Dropdown(options=pairs, description=name)
    return Control(name, widget, choices=tuple(value for _, value in pairs))


def _of_widget(name: str, widget: Any) -> Control:
    """The user's own widget as it is; it is asked for what it allows."""
    if not hasattr(widget, "value"):
        raise TypeError(f"a {type(widget).__name__} has no value.")
    if not getattr(widget, "description", "given"):
        widget.description = name
    if isinstance(widget, ipywidgets.widgets.widget_selection._Selection):
        choices = tuple(value for _, value in widget._options_full)
        return Control(name, widget, choices=choices, ours=False)
    low, high = getattr(widget, "min", None), getattr(widget, "max", None)
    if isinstance(widget, ipywidgets.FloatLogSlider):
        low, high = widget.base**low, widget.base**high
    if isinstance(low, Real) and isinstance(high, Real):
        return Control(name, widget, low, high, ours=False)  # type: ignore[arg-type]
    return Control(name, widget, ours=False)


def _range(name: str, given: tuple[Any, ...]) -> Control:
    if len(given) not in (2, 3) or not all(
        isinstance(x, Real) and not isinstance(x, bool) and math.isfinite(x) for x in given
    ):
        raise ValueError("a range is two numbers, and a step if you like.")
    low, high = given[:2]
    if not low < high:
        raise ValueError("a range goes from a smaller number to a greater one.")
    if len(given) == 3 and not given[2] > 0:
        raise ValueError("its step must be more than 0.")
    if name in (*BYTES, *LOGARITHMIC) and len(given) == 2:
        if low <= 0:
            raise ValueError(f"{name} is on a logarithmic scale, which begins above 0.")
        return (_bytes if name in BYTES else _logarithmic)(name, low, high)
    widget = _interact(name, (low, high, given[2] if len(given) == 3 else _step(low, high)))
    return Control(name, widget, low, high)


def _interact(name: str, abbreviation: Any) -> Any:
    """What ``ipywidgets.interact`` makes of it."""
    widget = ipywidgets.interactive.widget_from_abbrev(abbreviation)
    if widget is None or (isinstance(abbreviation, Real) and not isinstance(abbreviation, bool)):
        raise TypeError("one value is no range.")
    widget.description = name
    if isinstance(widget, ipywidgets.FloatSlider):
        widget.readout_format = ".4"
    return widget


def _step(low: float, high: float) -> float:
    """Whole numbers one by one; others in a hundredth of the range, to a power of ten."""
    if isinstance(low, Integral) and isinstance(high, Integral):
        return 1
    return float(10.0 ** math.floor(math.log10((high - low) / 10) + 1e-9) / 10)


def _bytes(name: str, low: float, high: float) -> Control:
    """Powers of two, with units."""
    powers = (2**k for k in range(math.ceil(math.log2(low)), math.floor(math.log2(high)) + 1))
    widget = ipywidgets.SelectionSlider(
        options=_sizes({int(low), int(high), *powers}), description=name
    )
    return Control(name, widget, int(low), int(high))


def _sizes(values: Iterable[int]) -> list[tuple[str, int]]:
    return [(human_bytes(n), n) for n in sorted(values)]


def _logarithmic(name: str, low: float, high: float) -> Control:
    ends = math.log10(low), math.log10(high)
    widget = ipywidgets.FloatLogSlider(
        min=ends[0],
        max=ends[1],
        step=0.1,
        readout_format=".3",
        value=math.sqrt(low * high),
        description=name,
    )
    return Control(name, widget, float(low), float(high), digits=3)
