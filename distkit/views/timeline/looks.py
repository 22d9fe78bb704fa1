"""What an operation is called and how it is drawn, as plain data: what many have in common."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from distkit.events import COLLECTIVES, COMPUTATION, REQUESTS, STORES, WORLD, Op
from distkit.trace.calls import call, op_name, wait_of
from distkit.trace.columns import Look
from distkit.views.scene.frame import Json, clean
from distkit.views.scene.units import human_bytes, human_seconds

TOUCHED = "buffer used before wait()"


@lru_cache(10_000)
def look_of(it: Look) -> Json:
    """What many operations have in common, as plain data; not to be changed."""
    label = TOUCHED if it.op is Op.TOUCH else it.label
    if it.op in STORES:  # its arguments, as the program writes them
        label = call(it).removesuffix(")").partition("(")[2]
    return compact(
        kind=kind_of(it.op),
        op=clean(wait_of(it) or op_name(it)),
        state=str(it.state),
        peer=it.peer,
        group=None if it.group == WORLD else it.group,
        nbytes=it.nbytes,
        shape=list(it.shape),
        dtype=it.dtype,
        tag=it.tag,
        where=clean(it.where.rpartition("/")[2]),
        label=clean(label),
        gpu=clean(_gpu(it.attributes)),
    )


def _gpu(facts: Mapping[str, Any]) -> str:
    """Where on a GPU an operation was, how long the GPU took for it, and the memory in use then."""
    told = [str(facts["device"])] if "device" in facts else []
    told += [f"stream {facts['stream']}"] if "stream" in facts else []
    told += [f"{human_seconds(facts['device_seconds'])} there"] if "device_seconds" in facts else []
    told += [f"{human_bytes(facts['memory'])} in use"] if "memory" in facts else []
    return " · ".join(told)


def kind_of(op: Op) -> str:
    """How an operation is drawn."""
    if op in COLLECTIVES:
        return "collective"
    if op in COMPUTATION:
        return "mark"
    if op in STORES:
        return "store"
    return "request" if op in REQUESTS else str(op)


def rounded(seconds: float | None) -> float | None:
    """Seconds to a tenth of a microsecond; None where there is no time."""
    return None if seconds is None or not math.isfinite(seconds) else round(float(seconds), 7)


def compact(**fields: Any) -> Json:
    """An object without what says nothing; None stays where it says "not yet"."""
    kept = ("end", "sent", "received")
    return {k: v for k, v in fields.items() if k in kept or v not in (None, "", [])}
