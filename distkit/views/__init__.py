"""Pictures of a trace: pure projections, with a painter for the browser and a static one."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distkit.views.cockpit import Cockpit
    from distkit.views.compare import Compare
    from distkit.views.gradients import Gradients
    from distkit.views.page import to_html
    from distkit.views.servers import Servers
    from distkit.views.stage import Stage
    from distkit.views.tensors import Tensors
    from distkit.views.timeline import Timeline

__all__ = ["Cockpit", "Compare", "Gradients", "Servers", "Stage", "Tensors", "Timeline", "to_html"]

_HOMES = {
    "Cockpit": "cockpit",
    "Compare": "compare",
    "Gradients": "gradients",
    "Servers": "servers",
    "Stage": "stage",
    "Tensors": "tensors",
    "Timeline": "timeline",
    "to_html": "page",
}


def __getattr__(name: str) -> Any:
    """Load a view when it is first used: widgets take a while to import."""
    if name in _HOMES:
        return getattr(importlib.import_module(f"distkit.views.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
