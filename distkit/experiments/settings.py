"""What can be set in an experiment, and what a run is given."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from numbers import Integral, Real
from typing import Any

from distkit.experiments.controls import (
    EMPTY,
    OWN,
    RANKS,
    STRAGGLER,
    Control,
    make,
    named,
    parameters,
    said,
)

#: How many ranks an experiment has that is told nothing about them.
DEFAULT_RANKS = 4


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

    def product(self, **values: Any) -> list[dict[str, Any]]:
        """The values of many runs: every combination of the values given, the last varying most.

        Raises:
            TypeError, ValueError: as :meth:`complete`; or there is nothing to go through.
        """
        lists = {name: _listed(name, given) for name, given in values.items()}
        if not lists:
            raise TypeError("a sweep goes through values: experiment.sweep(batch=[8, 16, 32])")
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
            if name not in self._known and name not in OWN:
                known = ", ".join([*self._known, *OWN])
                raise TypeError(f"{self._fn} has no parameter {name}; it can be told: {known}.")


def check_ranks(value: Any) -> None:
    """Raise ValueError when so many ranks cannot be."""
    if not isinstance(value, Integral) or isinstance(value, bool) or value < 1:
        raise ValueError(f"ranks={said(value)} cannot be: a whole number, at least 1.")


def check_straggler(value: Any) -> None:
    """Raise ValueError when so many seconds cannot be."""
    number = isinstance(value, Real) and not isinstance(value, bool)
    if not number or not 0 <= value < math.inf:
        raise ValueError(f"straggler={said(value)} cannot be: seconds, at least 0.")


def _checked(control: Control, check: Callable[[Any], None]) -> Control:
    """The control, if what it allows can be."""
    for value in control.choices or [x for x in (control.low, control.high) if math.isfinite(x)]:
        check(value)
    return control


def _listed(name: str, given: Any) -> list[Any]:
    if isinstance(given, str) or not isinstance(given, Iterable):
        return [given]
    listed = list(given)
    if not listed:
        raise ValueError(f"sweep({name}=[]): there is no value to go through.")
    return listed
