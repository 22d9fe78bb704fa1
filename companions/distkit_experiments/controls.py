"""Controls of an experiment: ipywidgets, from abbreviations as in ``interact``."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import ipywidgets
from traitlets import TraitError

from distkit.views.scene.units import human_bytes, human_seconds, round_step

#: What an experiment does itself, and does not hand to the function.
RANKS, STRAGGLER = "ranks", "straggler"
OWN = {RANKS: "how many ranks run it", STRAGGLER: "seconds that the last rank loses"}
#: Of :func:`distkit.trouble`, where the function has no such parameter itself.
NETWORK = {"latency": "seconds of each message", "bandwidth": "bytes per second of each rank"}
#: Parameters in seconds, which are shown in milliseconds below one, and in bytes per second.
TIMES, RATE, MEGA = (STRAGGLER, "latency"), "bandwidth", 1e6
#: Parameters of the function whose range reads best in powers: of two with units, of ten.
BYTES, LOGARITHMIC = ("size", "nbytes"), ("lr", "learning_rate", *NETWORK)

#: A range of other than whole numbers has at most so many steps.
MOST_STEPS = 80

#: How many ranks an experiment has that is told nothing about them.
DEFAULT_RANKS = 4

EMPTY = inspect.Parameter.empty


class Settings:
    """The parameters of a function and of its run, each with its control, if it has one.

    Args:
        fn: what runs on the ranks.
        given: abbreviations of controls, by parameter.
        ranks: those of the cluster that is there, if one is.

    Raises:
        TypeError: the function has no such parameter, or one with neither default nor control.
        ValueError: a control allows what cannot be.
    """

    def __init__(
        self, fn: Callable[..., Any], given: Mapping[str, Any], ranks: int | None = None
    ) -> None:
        self._fn, self._known = named(fn), parameters(fn)
        self.network = set() if "**" in self._known else {*NETWORK} - {*self._known}
        self._check_names(given)
        self.controls: dict[str, Control] = {}
        for name, abbreviation in given.items():
            if name == RANKS:
                self._take_ranks(abbreviation, ranks)
            elif name == STRAGGLER:
                self._take_straggler(abbreviation)
            else:
                self.controls[name] = make(name, abbreviation, self._known.get(name, EMPTY))
        if RANKS not in given:
            self._ranks = ranks or DEFAULT_RANKS
        needed = [n for n, d in self._known.items() if d is EMPTY and n not in given]
        if needed:
            raise TypeError(
                f"{self._fn} needs {', '.join(needed)}: give a default, or a control such as "
                f"{needed[0]}=(8, 128)."
            )

    def complete(self, **changed: Any) -> dict[str, Any]:
        """The values of one run: as the controls stand, but for those that are given.

        Raises:
            TypeError: there is no such parameter.
            ValueError: a value is outside its control.
        """
        self._check_names(changed)
        for name, value in changed.items():
            if name in OWN:
                (check_ranks if name == RANKS else check_straggler)(value)
            if name in self.controls:
                self.controls[name].check(value)
        standing = {name: control.value for name, control in self.controls.items()}
        return {RANKS: self._ranks, **standing, **changed}

    @contextmanager
    def moved(self, values: Mapping[str, Any]) -> Iterator[None]:
        """Have the controls stand at a run's values while it lasts, and then as before."""
        own = {name: c for name, c in self.controls.items() if name in values and c.ours}
        before = {name: control.widget.value for name, control in own.items()}
        stand_at(self.controls, values)
        try:
            yield
        finally:
            for name, control in own.items():
                control.widget.value = before[name]

    def product(self, **values: Any) -> list[dict[str, Any]]:
        """The values of many runs: every combination of the values given, the last varying most.

        Raises:
            TypeError, ValueError: as :meth:`complete`; or there is nothing to go through.
        """
        lists = {name: listed(name, given) for name, given in values.items()}
        if not lists:
            raise TypeError("sweep() needs values: experiment.sweep(batch=[8, 16, 32])")
        return [
            self.complete(**dict(zip(lists, chosen, strict=True)))
            for chosen in itertools.product(*lists.values())
        ]

    def _take_ranks(self, given: Any, standing: int | None) -> None:
        """A number fixes them; a control begins at the cluster's own, where it allows that."""
        if isinstance(given, Real):
            check_ranks(given)
            self._ranks = int(float(given))
            return
        control = _checked(make(RANKS, given), check_ranks)
        try:
            start = DEFAULT_RANKS if standing is None else standing
            control.check(start)
        except ValueError:
            start = control.choices[0] if control.choices else int(control.low)
        if control.ours:
            control.start_at(start)
        self.controls[RANKS], self._ranks = control, start

    def _take_straggler(self, given: Any) -> None:
        """It begins where nobody loses time, or as little as can be."""
        control = self.controls[STRAGGLER] = _checked(make(STRAGGLER, given), check_straggler)
        if control.ours and math.isfinite(control.low):
            control.start_at(control.low)

    def _check_names(self, names: Iterable[str]) -> None:
        if "**" in self._known:
            return
        for name in names:
            if name not in self._known and name not in {*OWN, *self.network}:
                known = ", ".join([*self._known, *OWN, *sorted(self.network)])
                raise TypeError(f"{self._fn} has no parameter {name}. Parameters: {known}.")


def check_ranks(value: Any) -> None:
    """Raise ValueError when so many ranks cannot be."""
    if not isinstance(value, Integral) or isinstance(value, bool) or value < 1:
        raise ValueError(f"ranks={said(value)}: must be a whole number, at least 1.")


def check_straggler(value: Any) -> None:
    """Raise ValueError when so many seconds cannot be."""
    number = isinstance(value, Real) and not isinstance(value, bool)
    if not number or not 0 <= value < math.inf:
        raise ValueError(f"straggler={said(value)}: must be seconds, at least 0.")


def _checked(control: Control, check: Callable[[Any], None]) -> Control:
    """The control, if what it allows can be."""
    for value in control.choices or [x for x in (control.low, control.high) if math.isfinite(x)]:
        check(value)
    return control


def listed(name: str, given: Any) -> list[Any]:
    """The values to go through of one parameter: a list, or the one value that is given."""
    if isinstance(given, str) or not isinstance(given, Iterable):
        return [given]
    listed = list(given)
    if not listed:
        raise ValueError(f"sweep({name}=[]): it has no values.")
    return listed


@dataclass(frozen=True)
class Control:
    """A widget, and the values that it allows: a range, or choices, or any."""

    name: str
    widget: Any
    low: float = -math.inf
    high: float = math.inf
    choices: tuple[Any, ...] = ()
    digits: int | None = None  # the readout's, on a logarithmic scale
    scale: float = 1.0  # of the widget's number to the value's: it may have another unit
    unit: str = ""
    ours: bool = True  # else the reader's own widget, which stays as it is

    @property
    def value(self) -> Any:
        """The current value, as its readout shows it."""
        value = self.widget.value if self.scale == 1 else self.widget.value / self.scale
        return value if self.digits is None else float(f"{value:.{self.digits}g}")

    def check(self, value: Any) -> None:
        """Raise ValueError when the control does not allow a value, which says what it does."""
        if self.choices:
            if not any(value is c or value == c for c in self.choices):
                known = ", ".join(map(said, self.choices))
                raise ValueError(f"{self.name}={said(value)} is not one of its choices: {known}.")
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
        self.widget.value = value if self.scale == 1 else value * self.scale

    @property
    def _whole(self) -> bool:
        return isinstance(self.low, Integral) and isinstance(self.high, Integral)

    def _within(self, value: Any) -> bool:
        number = isinstance(value, Integral if self._whole else Real)
        return number and not isinstance(value, bool) and bool(self.low <= value <= self.high)


def stand_at(controls: Mapping[str, Control], values: Mapping[str, Any]) -> None:
    """Have those of our controls that have a value among these stand at it."""
    for name, control in controls.items():
        if control.ours and name in values:
            with suppress(TraitError):  # a text or a checkbox stays where it cannot show a value
                control.start_at(values[name])


def said(value: Any) -> str:
    """A parameter's value in a sentence, a table, a legend.

    >>> said(0.1 + 0.2), said(print), said("ring")
    ('0.3', 'print', 'ring')
    """
    if isinstance(value, float):
        return f"{value:.6g}"
    return str(getattr(value, "__name__", value))


def worded(name: str, value: Any) -> str:
    """The same with the unit that its parameter has.

    >>> worded("straggler", 0.02), worded("latency", 0), worded("bandwidth", 1e9), worded("n", 2)
    ('20 ms', '0 s', '1,000 MB/s', '2')
    """
    number = isinstance(value, Real) and not isinstance(value, bool)
    if number and name in TIMES:
        return human_seconds(float(value)) if value else "0 s"
    if number and name == RATE:
        return f"{float(f'{value / MEGA:.3g}'):,g} MB/s"
    return said(value)


def parameters(fn: Callable[..., Any]) -> dict[str, Any]:
    """The function's parameters and their defaults, EMPTY for none; ``**`` if it takes any.

    Raises:
        TypeError: it is no function, or takes what has no name.
    """
    if not callable(fn):
        raise TypeError(f"an experiment needs a function, not {fn!r}: dk.Experiment(train)")
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
            f"{name}={abbreviation!r} cannot become a control: {error} A control is a range (8, "
            "128), "
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
        pairs = [(worded(name, value), value) for value in abbreviation]
    else:
        return Control(name, _interact(name, abbreviation))
    if not pairs:
        raise ValueError("the list of choices is empty.")
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
        raise ValueError("a range has two numbers and optionally a step.")
    low, high = given[:2]
    if not low < high:
        raise ValueError("a range goes from a smaller number to a greater one.")
    if len(given) == 3 and not given[2] > 0:
        raise ValueError("its step must be more than 0.")
    if name in (*BYTES, *LOGARITHMIC) and len(given) == 2:
        if low <= 0:
            raise ValueError(f"{name} is on a logarithmic scale, which begins above 0.")
        return (_bytes if name in BYTES else _logarithmic)(name, low, high)
    scale, unit = _unit(name, high)
    if scale != 1:
        low, high = float(low), float(high)
    step = given[2] if len(given) == 3 else _step(low, high)
    widget = _interact(name, (low * scale, high * scale, step * scale))
    return Control(name, widget, low, high, scale=scale, unit=unit)


def _unit(name: str, high: float) -> tuple[float, str]:
    """How many of the unit on the page are one of the value's, and that unit."""
    if name in TIMES:
        return (1e3, "[ms]") if high <= 1 else (1, "[s]")
    return (1 / MEGA, "[MB/s]") if name == RATE else (1, "")


def _interact(name: str, abbreviation: Any) -> Any:
    """The control that ``ipywidgets.interact`` makes of it."""
    widget = ipywidgets.interactive.widget_from_abbrev(abbreviation)
    if widget is None or (isinstance(abbreviation, Real) and not isinstance(abbreviation, bool)):
        raise TypeError("a range needs two different values.")
    widget.description = name
    if isinstance(widget, ipywidgets.FloatSlider):
        widget.readout_format = ".4"
    return widget


def _step(low: float, high: float) -> float:
    """Whole numbers one by one; others in round steps."""
    if isinstance(low, Integral) and isinstance(high, Integral):
        return 1
    return round_step(high - low, MOST_STEPS)


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
    scale, unit = _unit(name, high)
    ends = math.log10(low * scale), math.log10(high * scale)
    widget = ipywidgets.FloatLogSlider(
        min=ends[0],
        max=ends[1],
        step=0.1,
        readout_format=".3r",
        value=math.sqrt(low * high) * scale,
        description=name,
    )
    return Control(name, widget, float(low), float(high), digits=3, scale=scale, unit=unit)
