"""Controls of an experiment: ipywidgets, from abbreviations as in ``interact``."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import ipywidgets

from distkit._format import human_bytes, human_seconds, round_step

#: What an experiment does itself, and does not hand to the function.
RANKS, STRAGGLER = "ranks", "straggler"
OWN = {RANKS: "how many ranks run it", STRAGGLER: "seconds that the last rank loses"}
#: Of :func:`distkit.trouble`, where the function has no such parameter itself.
NETWORK = {"latency": "seconds of each message", "bandwidth": "bytes per second of each rank"}
#: Parameters in seconds, which are shown in milliseconds below one, and in bytes per second.
TIMES, RATE, MEGA = (STRAGGLER, "latency"), "bandwidth", 1e6
#: Parameters of the function whose range reads best in powers: of two with units, of ten.
BYTES, LOGARITHMIC = ("size", "nbytes"), ("lr", "learning_rate", *NETWORK)

EMPTY = inspect.Parameter.empty


class Settings:
    """The parameters of a function and of its run, each with its control, if it has one.

    Args:
        fn: what runs on the ranks.
        given: abbreviations of controls, by parameter.
        ranks: those of the cluster that is there, if one is.

    Raises:
        TypeError: the function has no such parameter, or one with neither default nor control.
        ValueError: a control allows an impossible value.
    """

    def __init__(
        self, fn: Callable[..., Any], given: Mapping[str, Any], ranks: int | None = None
    ) -> None:
        self._fn, self._known = named(fn), parameters(fn)
        self.network = set() if "**" in self._known else {*NETWORK} - {*self._known}
        self._check_names(given)
        own = {RANKS: ranks or 4, STRAGGLER: 0}
        self._ranks = own[RANKS]
        self.controls = {
            name: make(name, abbreviation, {**self._known, **own}.get(name, EMPTY))
            for name, abbreviation in given.items()
        }
        needed = [n for n, d in self._known.items() if d is EMPTY and n not in given]
        if needed:
            raise TypeError(
                f"{self._fn} needs {', '.join(needed)}: give a default, or a control such as "
                f"{needed[0]}=(8, 128)."
            )

    def complete(self, **changed: Any) -> dict[str, Any]:
        """The values of one run: those of the controls, except for those that are given.

        Raises:
            TypeError: there is no such parameter.
            ValueError: a value is outside its control.
        """
        self._check_names(changed)
        for name, value in changed.items():
            check_own(name, value)
            if name in self.controls:
                self.controls[name].check(value)
        standing = {name: control.value for name, control in self.controls.items()}
        return {RANKS: self._ranks, **standing, **changed}

    def product(self, **values: Any) -> list[dict[str, Any]]:
        """The values of many runs: every combination of the values given, the last varying most.

        Raises:
            TypeError, ValueError: as :meth:`complete`; or there are no values.
        """
        if not values:
            raise TypeError("sweep() needs values: experiment.sweep(batch=[8, 16, 32])")
        lists = [listed(name, given) for name, given in values.items()]
        return [
            self.complete(**dict(zip(values, chosen, strict=True)))
            for chosen in itertools.product(*lists)
        ]

    def _check_names(self, names: Iterable[str]) -> None:
        known = {**self._known, **dict.fromkeys([*OWN, *sorted(self.network)])}
        for name in names:
            if name not in known and "**" not in known:
                raise TypeError(
                    f"{self._fn} has no parameter {name}. Parameters: {', '.join(known)}."
                )


def check_own(name: str, value: Any) -> None:
    """Raise ValueError when there cannot be so many ranks, or such a delay."""
    if name == RANKS and not (is_number(value) and isinstance(value, int) and value >= 1):
        raise ValueError(f"ranks={said(value)}: must be a whole number, at least 1.")
    if name == STRAGGLER and not (is_number(value) and 0 <= value < math.inf):
        raise ValueError(f"straggler={said(value)}: must be seconds, at least 0.")


def listed(name: str, given: Any) -> list[Any]:
    """The values of one parameter in a sweep: a list, or the one value that is given."""
    found = [given] if isinstance(given, str) or not isinstance(given, Iterable) else [*given]
    if not found:
        raise ValueError(f"sweep({name}=[]): it has no values.")
    return found


@dataclass(frozen=True)
class Control:
    """A widget, and the values that it allows: a range, or choices, or any."""

    name: str
    widget: Any
    low: float = -math.inf
    high: float = math.inf
    choices: tuple[Any, ...] = ()
    scale: float = 1.0  # the widget's number is the value times this: it may have another unit
    unit: str = ""
    ours: bool = True  # else the reader's own widget, which stays as it is

    @property
    def value(self) -> Any:
        """The current value, as its readout shows it."""
        if isinstance(self.widget, ipywidgets.FloatLogSlider) and self.ours:
            return float(f"{self.widget.value / self.scale:.3g}")
        return self.widget.value if self.scale == 1 else self.widget.value / self.scale

    def check(self, value: Any) -> None:
        """Raise ValueError, which says what the control allows, when it does not allow a value."""
        if self.choices and value not in self.choices:
            known = ", ".join(map(said, self.choices))
            raise ValueError(f"{self.name}={said(value)} is not one of its choices: {known}.")
        whole = isinstance(self.low, Integral) and isinstance(self.high, Integral)
        number = is_number(value) and isinstance(value, Integral if whole else Real)
        if self.low > -math.inf and not (number and self.low <= value <= self.high):
            raise ValueError(
                f"{self.name}={said(value)} is outside its control: {'whole numbers ' * whole}"
                f"{said(self.low)} to {said(self.high)}. Make its range wider."
            )

    def start_at(self, value: Any) -> None:
        """Set the widget to a value that the control allows."""
        if isinstance(self.widget, ipywidgets.SelectionSlider):
            self.widget.options = _sizes({*(n for _, n in self.widget.options), value})
        self.widget.value = value if self.scale == 1 else value * self.scale


def said(value: Any) -> str:
    """A parameter's value in a sentence, a table, a legend.

    >>> said(0.1 + 0.2), said(print), said("ring")
    ('0.3', 'print', 'ring')
    """
    if isinstance(value, float):
        return f"{value:.6g}"
    return str(getattr(value, "__name__", value))


def is_number(value: Any) -> bool:
    """True if it has a place on an axis."""
    return isinstance(value, Real) and not isinstance(value, bool)


def shown(name: str, value: Any) -> str:
    """The same with the unit that its parameter, or the column of its result, has.

    >>> shown("seconds", 0.25), shown("size", 4096), shown("loss", 0.123456), shown("ranks", 4)
    ('250 ms', '4 KiB', '0.1235', '4')
    >>> shown("straggler", 0.02), shown("latency", 0), shown("bandwidth", 1e9), shown("how", "ring")
    ('20 ms', '0 s', '1,000 MB/s', 'ring')
    """
    if not is_number(value):
        return said(value)
    if name in (*TIMES, "seconds", "seconds a step", "waiting"):
        return human_seconds(float(value)) if value else "0 s"
    if name == RATE:
        return f"{float(f'{value / MEGA:.3g}'):,g} MB/s"
    if name in (*BYTES, "bytes"):
        return human_bytes(float(value))
    if not isinstance(value, float):
        return f"{value:,}"
    return f"{value:.3g}" if abs(value) < 0.1 else f"{value:.4g}"  # a small one's zeros are wide


def parameters(fn: Callable[..., Any]) -> dict[str, Any]:
    """The function's parameters and their defaults, EMPTY for none; ``**`` if it takes any.

    Raises:
        TypeError: it is no function, or has a parameter without a name.
    """
    if not callable(fn):
        raise TypeError(f"an experiment needs a function, not {fn!r}: dk.Experiment(train)")
    found = {}
    for p in inspect.signature(fn).parameters.values():
        if p.kind in (p.POSITIONAL_ONLY, p.VAR_POSITIONAL):
            raise TypeError(f"{named(fn)}: {p} has no name to set it by. Use named parameters.")
        if p.name in OWN:
            raise TypeError(
                f"{named(fn)} has a parameter {p.name}, which an experiment sets itself: "
                f"{OWN[p.name]}. Give it another name; ranks can ask dist.get_world_size()."
            )
        any_other = p.kind is p.VAR_KEYWORD
        found["**" if any_other else p.name] = None if any_other else p.default
    return found


def named(fn: Callable[..., Any]) -> str:
    """A function in a sentence."""
    return f"{getattr(fn, '__name__', type(fn).__name__)}()"


def make(name: str, abbreviation: Any, default: Any = EMPTY) -> Control:
    """The control of one parameter, at its default.

    Args:
        name: the parameter.
        abbreviation: (low, high) or (low, high, step), a list or dict of choices, a bool, text,
            or a widget; one number for the ranks.
        default: its first value; a range's middle if EMPTY.

    Raises:
        ValueError: the range is empty, or the default outside.
        TypeError: there is no control for this.
    """
    try:
        control = _made(name, abbreviation)
    except Exception as error:  # ipywidgets and traitlets raise all kinds
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(
            f"{name}={abbreviation!r} cannot become a control: {error} A control is a range "
            '(8, 128), choices ["ring", "gloo"], True or False, a text, or a widget.'
        ) from None
    for value in control.choices or [x for x in (control.low, control.high) if math.isfinite(x)]:
        check_own(name, value)
    if not control.ours:
        return control
    control.widget.description = f"{name} {control.unit}".strip()
    control.widget.style.description_width = "initial"
    control.widget.layout.width = "auto"
    if default is EMPTY:
        return control
    try:
        control.check(default)
    except ValueError as error:
        if name not in OWN:
            raise ValueError(f"{name} begins at the function's default, and {error}") from None
        default = control.choices[0] if control.choices else control.low
    control.start_at(default)
    return control


def _made(name: str, abbreviation: Any) -> Control:
    if isinstance(abbreviation, ipywidgets.Widget):
        if not hasattr(abbreviation, "value"):
            raise TypeError(f"a {type(abbreviation).__name__} has no value.")
        abbreviation.description = getattr(abbreviation, "description", "") or name
        return Control(name, abbreviation, ours=False)
    if isinstance(abbreviation, tuple):
        return _range(name, abbreviation)
    if name == RANKS and isinstance(abbreviation, Real):
        abbreviation = [abbreviation]
    if isinstance(abbreviation, str) or not isinstance(abbreviation, Iterable):
        return Control(name, _interact(abbreviation))
    pairs = (
        [*abbreviation.items()]
        if isinstance(abbreviation, Mapping)
        else [(shown(name, value), value) for value in abbreviation]
    )
    if not pairs:
        raise ValueError("the list of choices is empty.")
    widget = ipywidgets.Dropdown(options=pairs)
    return Control(name, widget, choices=tuple(value for _, value in pairs))


def _range(name: str, given: tuple[Any, ...]) -> Control:
    numbers = len(given) in (2, 3) and all(is_number(x) and math.isfinite(x) for x in given)
    if not numbers or not given[0] < given[1] or min(given[2:], default=1) <= 0:
        raise ValueError("a range is a smaller and a greater number, and a step above 0 if any.")
    low, high, *step = given
    if name in (*BYTES, *LOGARITHMIC) and not step:
        if low <= 0:
            raise ValueError(f"{name} is on a logarithmic scale, which begins above 0.")
        return (_bytes if name in BYTES else _logarithmic)(name, low, high)
    scale, unit = _unit(name, high)
    low, high = (low, high) if scale == 1 else (float(low), float(high))
    whole = isinstance(low, Integral) and isinstance(high, Integral)
    by = step[0] if step else 1 if whole else round_step(high - low, 80)
    widget = _interact((low * scale, high * scale, by * scale))
    return Control(name, widget, low, high, scale=scale, unit=unit)


def _unit(name: str, high: float) -> tuple[float, str]:
    """How many of the unit on the page are one of the value's, and that unit."""
    if name in TIMES:
        return (1e3, "[ms]") if high <= 1 else (1, "[s]")
    return (1 / MEGA, "[MB/s]") if name == RATE else (1, "")


def _interact(abbreviation: Any) -> Any:
    """The control that ``ipywidgets.interact`` makes of it."""
    widget = ipywidgets.interactive.widget_from_abbrev(abbreviation)
    if widget is None or is_number(abbreviation):
        raise TypeError("a range needs two different values.")
    if isinstance(widget, ipywidgets.FloatSlider):
        widget.readout_format = ".4"
    return widget


def _bytes(name: str, low: float, high: float) -> Control:
    """Powers of two, with units."""
    powers = (2**k for k in range(math.ceil(math.log2(low)), math.floor(math.log2(high)) + 1))
    options = _sizes({int(low), int(high), *powers})
    widget = ipywidgets.SelectionSlider(options=options)
    return Control(name, widget, int(low), int(high))


def _sizes(values: Iterable[int]) -> list[tuple[str, int]]:
    return [(human_bytes(n), n) for n in sorted(values)]


def _logarithmic(name: str, low: float, high: float) -> Control:
    scale, unit = _unit(name, high)
    widget = ipywidgets.FloatLogSlider(
        min=math.log10(low * scale),
        max=math.log10(high * scale),
        step=0.1,
        readout_format=".3r",
        value=math.sqrt(low * high) * scale,
    )
    return Control(name, widget, float(low), float(high), scale=scale, unit=unit)
