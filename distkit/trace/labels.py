"""What formats 1 and 2 of saved traces told in labels and tags, as attributes. Pure.

There the facts of an operation were words: ``update w → v3 ← 0, 1 (2 late)``, ``get ready``. A tag
was also a push's clock, or how many gradients an answer said were dropped.
"""

from __future__ import annotations

import re
from typing import Any

from distkit.events import P2P, REQUESTS, STORES, Op

_UPDATE = re.compile(r"update (?P<key>.*) → v(?P<version>\d+)(?: ← (?P<late>\d+.*))?", re.DOTALL)
_GRADIENT = re.compile(r"(\d+)(?: \((\d+) late\))?")
_WATCHED = re.compile(r"(gradient|alone|weights) (.*)|(step)", re.DOTALL)
_STEP = re.compile(r"step (\d+)(?:/(\d+))?")
_BARRIER = re.compile(r"barrier (.*), (\d+)", re.DOTALL)
_MEMBERS = re.compile(r"\d+(,\d+)*")


def attributes(op: Op, label: str, tag: int | None, dtype: str, valued: bool) -> dict[str, Any]:
    """The facts in a label; ``valued``: whether events that look so have a summary.

    >>> attributes(Op.MARK, "update w → v3 ← 0, 1 (2 late)", 2, "", True)
    {'key': 'w', 'version': 3, 'workers': (0, 1), 'late': (0, 2)}
    """
    if op is Op.MARK:
        return _mark(label, valued or bool(dtype))
    if op in REQUESTS:
        return _request(op, label, tag, dtype)
    if op in STORES:
        method, _, keys = label.partition(" ")
        if found := _BARRIER.fullmatch(label):
            return {"method": method, "keys": (found[1],), "ranks": int(found[2])}
        return {"method": method, "keys": tuple(keys.split(", "))}
    if op is Op.NEW_GROUP:
        members = _MEMBERS.fullmatch(label)
        return {"members": tuple(map(int, label.split(",")))} if members else {}
    if label in ("", "gradients", "not a member"):
        return {"gradients": True} if label == "gradients" else {}
    if "_object" in label or op is Op.TOUCH:
        return {"function": label}
    if op not in P2P:
        return {"reduction": label}
    facts: dict[str, Any] = {"key": _key(label.removesuffix(": refused"))}
    refused = {"refused": True} if label.endswith(": refused") else {}
    return {**facts, **refused, **({"dropped": tag} if tag else {})}


def is_tag(op: Op, label: str) -> bool:
    """True if a tag is that of a point-to-point call."""
    return op in P2P and (not label or "_object" in label)


def _mark(label: str, valued: bool) -> dict[str, Any]:
    if found := _UPDATE.fullmatch(label):
        late = _GRADIENT.findall(found["late"] or "")
        return {
            "key": _key(found["key"]),
            "version": int(found["version"]),
            "workers": tuple(int(worker) for worker, _ in late),
            "late": tuple(int(n or 0) for _, n in late),
        }
    if found := _STEP.fullmatch(label):
        return {"step": int(found[1]), **({"steps": int(found[2])} if found[2] else {})}
    if valued and (found := _WATCHED.fullmatch(label)):
        what, name, step = found.groups()
        named = {} if step else {"checksum" if what == "weights" else "name": name}
        return {"watched": step or what, **named}
    return {"label": label} if label else {}


def _request(op: Op, label: str, tag: int | None, dtype: str) -> dict[str, Any]:
    if op is Op.REGISTER:
        mode, *terms = label.split() or [""]
        given = (term.partition("=") for term in terms)
        told = {name: int(value) if value.isdecimal() else value for name, _, value in given}
        return {"mode": mode, **told} if mode else {}
    if op is Op.INIT and label.startswith("optimizer ") and not dtype:
        return {"optimizer": label.partition(" ")[2]}
    names = label.split(", ")
    if len(names) > 1:
        return {"keys": tuple(map(_key, names))}
    return {"key": _key(label), **({"clock": tag} if tag else {})}


def _key(name: str) -> int | str:
    """A key from its name: digits were a number, unless they were quoted."""
    if re.fullmatch(r"-?\d{1,15}", name):
        return int(name)
    return name[1:-1] if re.fullmatch(r"'-*\d+'", name) else name
