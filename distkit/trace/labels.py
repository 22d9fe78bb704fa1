"""What formats 1 and 2 of saved traces told in labels and tags, as attributes. Pure.

There the facts of an operation were words: ``update w → v3 ← 0, 1 (2 late)``, ``get ready``. A tag
was also a push's clock, or how many gradients an answer said were dropped.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from distkit.events import COLLECTIVES, P2P, REQUESTS, STORES, Op

_MARK, _REDUCING = {Op.MARK}, COLLECTIVES - {Op.NEW_GROUP}
#: How labels of some operations read, the special ones first; a group's name is that of the fact.
#: A name in capitals holds for a mark with values, or a request without a tensor.
_FORMS: list[tuple[str, frozenset[Op] | set[Op], str]] = [
    ("", _MARK, r"update (?P<key>.*) → v(?P<version>\d+)(?: ← (?P<late>\d+.*))?"),
    ("", _MARK, r"step (?P<step>\d+)(?:/(?P<steps>\d+))?"),
    ("VALUES", _MARK, r"(?P<watched>gradient|alone) (?P<name>.*)"),
    ("VALUES", _MARK, r"(?P<watched>weights) (?P<checksum>.*)"),
    ("VALUES", _MARK, r"(?P<watched>step)"),
    ("", _MARK, r"(?P<label>.+)"),
    ("", STORES, r"(?P<method>barrier) (?P<keys>.*), (?P<ranks>\d+)"),
    ("", STORES, r"(?P<method>\S*) ?(?P<keys>.*)"),
    ("", {Op.NEW_GROUP}, r"(?P<members>\d+(,\d+)*)"),
    ("", {Op.REGISTER}, r"(?P<mode>\S+)(?P<terms>.*)|"),
    ("EMPTY", {Op.INIT}, r"optimizer (?P<optimizer>.*)"),
    ("", REQUESTS, r"(?P<keys>.*, .*)|(?P<key>.*)"),
    ("", P2P | _REDUCING, r"(?P<function>.*_object.*)|(?P<gradients>gradients)|not a member"),
    ("", P2P, r"(?P<key>.+?)(?P<refused>: refused)?"),
    ("", _REDUCING, r"(?P<reduction>.+)"),
    ("", {Op.TOUCH}, r"(?P<function>.+)"),
]
_GRADIENT = re.compile(r"(\d+)(?: \((\d+) late\))?")
_TERM = re.compile(r"(\w+)=(?:(\d+)|(\w+))")


def attributes(op: Op, label: str, tag: int | None, dtype: str, valued: bool) -> dict[str, Any]:
    """The facts in a label; ``valued``: whether events that look so have a summary.

    >>> attributes(Op.MARK, "update w → v3 ← 0, 1 (2 late)", 2, "", True)
    {'key': 'w', 'version': 3, 'late': (0, 2), 'workers': (0, 1)}
    """
    holds = {"": True, "VALUES": valued or bool(dtype), "EMPTY": not dtype}
    forms = (form for when, ops, form in _FORMS if op in ops and holds[when])
    found = next((f for form in forms if (f := re.fullmatch(form, label, re.DOTALL))), None)
    told = {k: v for k, v in found.groupdict().items() if v is not None} if found else {}
    facts = {name: _VALUES.get(name, str)(text) for name, text in told.items()}
    if "version" in facts:
        late = _GRADIENT.findall(told.get("late", ""))
        facts |= {
            "workers": (*(int(w) for w, _ in late),),
            "late": (*(int(n or 0) for _, n in late),),
        }
    facts |= {k: int(n) if n else word for k, n, word in facts.pop("terms", ())}
    if tag and "key" in facts and op is not Op.MARK:
        facts["dropped" if op in P2P else "clock"] = tag
    return facts


def is_tag(op: Op, label: str) -> bool:
    """True if a tag is that of a point-to-point call."""
    return op in P2P and (not label or "_object" in label)


def _key(name: str) -> int | str:
    """A key from its name: digits were a number, unless they were quoted."""
    if re.fullmatch(r"-?\d{1,15}", name):
        return int(name)
    return name[1:-1] if re.fullmatch(r"'-*\d+'", name) else name


_VALUES: dict[str, Callable[[str], Any]] = {
    "key": _key,
    "keys": lambda text: (*map(_key, text.split(", ")),),
    "members": lambda text: (*map(int, text.split(",")),),
    "terms": _TERM.findall,
    "refused": bool,
    "gradients": bool,
    **dict.fromkeys(("version", "step", "steps", "ranks"), int),
}
