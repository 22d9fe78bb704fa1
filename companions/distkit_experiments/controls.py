"""Controls of an experiment: ipywidgets created from abbreviations, as in ``interact``."""

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

#: Parameters of the experiment, which are not passed to the function.
RANKS, STRAGGLER = "ranks", "straggler"
RESERVED = {RANKS: "the number of ranks", STRAGGLER: "the delay of the last rank in seconds"}
#: Parameters of :func:`distkit.inject_faults`, unless the function has parameters with these names.
NETWORK = {"latency": "seconds per message", "bandwidth": "bytes per second on each rank"}
#: TIMES are the parameters in seconds. RATE is the parameter in bytes per second, shown in MB/s.
TIMES, RATE, MEGA = (STRAGGLER, "latency"), "bandwidth", 1e6
#: Results in seconds: those of each run, and those of :func:`distkit_simulation.measure_step`.
DURATIONS, STEP_TIMES = ("seconds", "seconds per step", "waiting"), ("compute", "sync", "step")
#: Parameters with logarithmic sliders. BYTES are numbers of bytes, whose sliders use powers of two.
BYTES, LOGARITHMIC = ("size", "nbytes"), ("lr", "learning_rate", *NETWORK)

EMPTY = inspect.Parameter.empty


class Settings:
    """The parameters of a function and its run, with their controls.

    Args:
        fn: the function to run on the ranks.
        abbreviations: abbreviations of controls, by parameter.
        ranks: the number of ranks of an existing cluster, if any.

    Raises:
        TypeError: a control is for an unknown parameter, or a parameter has neither a default nor a
            control.
        ValueError: a control allows an invalid value.
    """

    def __init__(
        self, fn: Callable[..., Any], abbreviations: Mapping[str, Any], ranks: int | None = None
    ) -> None:
        self._fn, self._known = display_name(fn), parameters(fn)
        self.network = set() if "**" in self._known else {*NETWORK} - {*self._known}
        self._check_names(abbreviations)
        defaults = {RANKS: ranks or 4, STRAGGLER: 0}
        self._ranks = defaults[RANKS]
        self.controls = {
            name: make(name, abbreviation, {**self._known, **defaults}.get(name, EMPTY))
            for name, abbreviation in abbreviations.items()
        }
        missing = [n for n, d in self._known.items() if d is EMPTY and n not in abbreviations]
        if missing:
            raise TypeError(
                f"{self._fn} needs {', '.join(missing)}. Add a default value, or pass a control "
                f"such as {missing[0]}=(8, 128)."
            )

    def complete(self, **changed: Any) -> dict[str, Any]:
        """Return the values for one run: the controls' values, updated with ``changed``.

        Raises:
            TypeError: a parameter is unknown.
            ValueError: a value is outside its control's range.
        """
        self._check_names(changed)
        for name, value in changed.items():
            check_reserved(name, value)
            if name in self.controls:
                self.controls[name].check(value)
        current = {name: control.value for name, control in self.controls.items()}
        return {RANKS: self._ranks, **current, **changed}

    def product(self, **values: Any) -> list[dict[str, Any]]:
        """Return the values for many runs: the product of the given lists.

        Raises:
            TypeError, ValueError: as in :meth:`complete`, or values are missing.
        """
        if not values:
            raise TypeError("sweep() needs values: experiment.sweep(batch=[8, 16, 32])")
        lists = [as_list(name, value) for name, value in values.items()]
        return [
            self.complete(**dict(zip(values, combination, strict=True)))
            for combination in itertools.product(*lists)
        ]

    def _check_names(self, names: Iterable[str]) -> None:
        known = {**self._known, **dict.fromkeys([*RESERVED, *sorted(self.network)])}
        for name in names:
            if name not in known and "**" not in known:
                raise TypeError(
                    f"{self._fn} has no parameter {name}. Parameters: {', '.join(known)}."
                )


def check_reserved(name: str, value: Any) -> None:
    """Raise ValueError for an invalid number of ranks or delay."""
    if name == RANKS and not (is_number(value) and isinstance(value, int) and value >= 1):
        raise ValueError(f"ranks must be an integer of at least 1, not {format_plain(value)}.")
    if name == STRAGGLER and not (is_number(value) and 0 <= value < math.inf):
        raise ValueError(
            f"straggler must be a finite delay of at least 0 seconds, not {format_plain(value)}."
        )


def as_list(name: str, value: Any) -> list[Any]:
    """Return the values of one parameter in a sweep as a list; a scalar is one value."""
    values = [value] if isinstance(value, str) or not isinstance(value, Iterable) else [*value]
    if not values:
        raise ValueError(f"sweep({name}=[]) has no values.")
    return values


@dataclass(frozen=True)
class Control:
    """A widget with its allowed values: a range, choices, or any value."""

    name: str
    widget: Any
    low: float = -math.inf
    high: float = math.inf
    choices: tuple[Any, ...] = ()
    scale: float = 1.0  # the widget's value divided by the parameter's value
    unit: str = ""
    owned: bool = True  # whether distkit created the widget

    @property
    def value(self) -> Any:
        """The current value, rounded as in the readout."""
        if isinstance(self.widget, ipywidgets.FloatLogSlider) and self.owned:
            return float(f"{self.widget.value / self.scale:.3g}")
        return self.widget.value if self.scale == 1 else self.widget.value / self.scale

    def check(self, value: Any) -> None:
        """Raise a ValueError that lists the allowed values if ``value`` is not one of them."""
        if self.choices and value not in self.choices:
            choices = ", ".join(map(format_plain, self.choices))
            raise ValueError(
                f"{self.name}={format_plain(value)} is not one of its choices: {choices}."
            )
        integral = isinstance(self.low, Integral) and isinstance(self.high, Integral)
        number = is_number(value) and isinstance(value, Integral if integral else Real)
        if self.low > -math.inf and not (number and self.low <= value <= self.high):
            raise ValueError(
                f"{self.name}={format_plain(value)} is outside its range: "
                f"{'integers from ' * integral}{format_plain(self.low)} to "
                f"{format_plain(self.high)}. Use a wider range."
            )

    def start_at(self, value: Any) -> None:
        """Set the widget to a value that the control allows."""
        if isinstance(self.widget, ipywidgets.SelectionSlider):
            self.widget.options = _byte_options({*(n for _, n in self.widget.options), value})
        self.widget.value = value if self.scale == 1 else value * self.scale


def format_plain(value: Any) -> str:
    """Format a parameter's value.

    >>> format_plain(0.1 + 0.2), format_plain(print), format_plain("ring")
    ('0.3', 'print', 'ring')
    """
    if isinstance(value, float):
        return f"{value:.6g}"
    return str(getattr(value, "__name__", value))


def is_number(value: Any) -> bool:
    """Return whether a value is a number, not a bool."""
    return isinstance(value, Real) and not isinstance(value, bool)


def format_value(name: str, value: Any) -> str:
    """Format a value with the unit of its parameter or result.

    >>> format_value("seconds", 0.25), format_value("size", 4096), format_value("loss", 0.123456)
    ('250 ms', '4 KiB', '0.1235')
    >>> format_value("compute", 0.25), format_value("step", 3)
    ('250 ms', '3')
    >>> format_value("straggler", 0.02), format_value("latency", 0), format_value("bandwidth", 1e9)
    ('20 ms', '0 s', '1,000 MB/s')
    >>> format_value("ranks", 4), format_value("algorithm", "ring")
    ('4', 'ring')
    """
    if not is_number(value):
        return format_plain(value)
    if name in (*TIMES, *DURATIONS) or (name in STEP_TIMES and isinstance(value, float)):
        return human_seconds(float(value)) if value else "0 s"
    if name == RATE:
        return f"{float(f'{value / MEGA:.3g}'):,g} MB/s"
    if name in (*BYTES, "bytes"):
        return human_bytes(float(value))
    if not isinstance(value, float):
        return f"{value:,}"
    return f"{value:.3g}" if abs(value) < 0.1 else f"{value:.4g}"


def parameters(fn: Callable[..., Any]) -> dict[str, Any]:
    """Return a function's parameters with their defaults or EMPTY; ``**`` stands for any name.

    Raises:
        TypeError: the argument is not a function, or has a positional-only or reserved parameter.
    """
    if not callable(fn):
        raise TypeError(f"an experiment needs a function, not {fn!r}. Use dk.Experiment(train).")
    defaults = {}
    for p in inspect.signature(fn).parameters.values():
        if p.kind in (p.POSITIONAL_ONLY, p.VAR_POSITIONAL):
            raise TypeError(
                f"{display_name(fn)}: {p} cannot be passed by name. Use named parameters."
            )
        if p.name in RESERVED:
            raise TypeError(
                f"{display_name(fn)} has a parameter named {p.name}, which an experiment reserves "
                f"for {RESERVED[p.name]}. Rename it; ranks can call dist.get_world_size()."
            )
        var_keyword = p.kind is p.VAR_KEYWORD
        defaults["**" if var_keyword else p.name] = None if var_keyword else p.default
    return defaults


def display_name(fn: Callable[..., Any]) -> str:
    """Return a function's name with parentheses."""
    return f"{getattr(fn, '__name__', type(fn).__name__)}()"


def make(name: str, abbreviation: Any, default: Any = EMPTY) -> Control:
    """Create the control of one parameter, set to its default.

    Args:
        name: the parameter.
        abbreviation: (low, high) or (low, high, step), a list or dict of choices, a bool, a string,
            or a widget; for the ranks, also a single number.
        default: the initial value; EMPTY for the middle of the range.

    Raises:
        ValueError: the control allows no value or an invalid one, or does not allow the default.
        TypeError: the abbreviation is not supported.
    """
    try:
        control = _create(name, abbreviation)
    except Exception as error:  # ipywidgets and traitlets raise various types
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(
            f"{name}={abbreviation!r} is not a control: {error} Use a range (8, 128), choices "
            '["ring", "gloo"], True or False, a string, or a widget.'
        ) from None
    for value in control.choices or [x for x in (control.low, control.high) if math.isfinite(x)]:
        check_reserved(name, value)
    if not control.owned:
        return control
    control.widget.description = f"{name} {control.unit}".strip()
    control.widget.style.description_width = "initial"
    control.widget.layout.width = "auto"
    if default is EMPTY:
        return control
    try:
        control.check(default)
    except ValueError as error:
        if name not in RESERVED:
            raise ValueError(f"{name} starts at the function's default, but {error}") from None
        default = control.choices[0] if control.choices else control.low
    control.start_at(default)
    return control


def _create(name: str, abbreviation: Any) -> Control:
    if isinstance(abbreviation, ipywidgets.Widget):
        if not hasattr(abbreviation, "value"):
            raise TypeError(f"{type(abbreviation).__name__} widgets have no value.")
        abbreviation.description = getattr(abbreviation, "description", "") or name
        return Control(name, abbreviation, owned=False)
    if isinstance(abbreviation, tuple):
        return _range(name, abbreviation)
    if name == RANKS and isinstance(abbreviation, Real):
        abbreviation = [abbreviation]
    if isinstance(abbreviation, str) or not isinstance(abbreviation, Iterable):
        return Control(name, _interact_widget(abbreviation))
    pairs = (
        [*abbreviation.items()]
        if isinstance(abbreviation, Mapping)
        else [(format_value(name, value), value) for value in abbreviation]
    )
    if not pairs:
        raise ValueError("the list of choices is empty.")
    return Control(
        name, ipywidgets.Dropdown(options=pairs), choices=tuple(value for _, value in pairs)
    )


def _range(name: str, numbers: tuple[Any, ...]) -> Control:
    valid = len(numbers) in (2, 3) and all(is_number(x) and math.isfinite(x) for x in numbers)
    if not valid or not numbers[0] < numbers[1] or min(numbers[2:], default=1) <= 0:
        raise ValueError("a range needs a lower and an upper bound, and any step must be above 0.")
    low, high, *step = numbers
    if name in (*BYTES, *LOGARITHMIC) and not step:
        if low <= 0:
            raise ValueError(f"{name} has a logarithmic scale, which must start above 0.")
        return (_byte_slider if name in BYTES else _log_slider)(name, low, high)
    scale, unit = _unit(name, high)
    low, high = (low, high) if scale == 1 else (float(low), float(high))
    integral = isinstance(low, Integral) and isinstance(high, Integral)
    increment = step[0] if step else 1 if integral else round_step(high - low, 80)
    widget = _interact_widget((low * scale, high * scale, increment * scale))
    return Control(name, widget, low, high, scale=scale, unit=unit)


def _unit(name: str, high: float) -> tuple[float, str]:
    """Return the factor from a parameter to its displayed unit, and the unit."""
    if name in TIMES:
        return (1e3, "[ms]") if high <= 1 else (1, "[s]")
    return (1 / MEGA, "[MB/s]") if name == RATE else (1, "")


def _interact_widget(abbreviation: Any) -> Any:
    """Return the widget of ``ipywidgets.interact`` for an abbreviation."""
    widget = ipywidgets.interactive.widget_from_abbrev(abbreviation)
    if widget is None or is_number(abbreviation):
        raise TypeError("a range needs two different values.")
    if isinstance(widget, ipywidgets.FloatSlider):
        widget.readout_format = ".4"
    return widget


def _byte_slider(name: str, low: float, high: float) -> Control:
    """Return a slider over the bounds and the powers of two between them, labeled with units."""
    powers = (2**k for k in range(math.ceil(math.log2(low)), math.floor(math.log2(high)) + 1))
    options = _byte_options({int(low), int(high), *powers})
    return Control(name, ipywidgets.SelectionSlider(options=options), int(low), int(high))


def _byte_options(values: Iterable[int]) -> list[tuple[str, int]]:
    return [(human_bytes(n), n) for n in sorted(values)]


def _log_slider(name: str, low: float, high: float) -> Control:
    scale, unit = _unit(name, high)
    widget = ipywidgets.FloatLogSlider(
        min=math.log10(low * scale),
        max=math.log10(high * scale),
        step=0.1,
        readout_format=".3r",
        value=math.sqrt(low * high) * scale,
    )
    return Control(name, widget, float(low), float(high), scale=scale, unit=unit)
