"""What a rank is told about itself. Imported by both sides; imports nothing heavy."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Spec:
    """All that a forked rank is told about itself.

    ``threads`` is torch's intra-op thread count; ``backend`` and ``device`` are decided, not
    "auto"; ``node`` describes its role in a parameter server, if the cluster has servers.
    """

    rank: int
    world_size: int
    folder: str
    backend: str = "gloo"
    device: str = "cpu"
    threads: int = 1
    node: Any = None
    environ: dict[str, str] = field(default_factory=dict)
    path: list[str] = field(default_factory=list)
    cwd: str = "."


def surroundings() -> dict[str, Any]:
    """What a rank takes over from the process that starts it, as fields of Spec."""
    return {"environ": dict(os.environ), "path": list(sys.path), "cwd": str(Path.cwd())}
