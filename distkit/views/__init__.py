"""Pictures of a trace: pure projections, with a painter for the browser and a static one."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distkit.views.cockpit.view import Cockpit
    from distkit.views.compare.view import Compare
    from distkit.views.gradients.view import Gradients
    from distkit.views.servers.view import Servers
    from distkit.views.shards.view import ShardMap
    from distkit.views.stage.view import Stage
    from distkit.views.tensors.view import Tensors
    from distkit.views.timeline.view import Timeline
    from distkit.views.widget.page import to_html

__all__ = [
    "Cockpit",
    "Compare",
    "Gradients",
    "Servers",
    "ShardMap",
    "Stage",
    "Tensors",
    "Timeline",
    "to_html",
]

_HOMES = {
    "Cockpit": "cockpit.view",
    "Compare": "compare.view",
    "Gradients": "gradients.view",
    "Servers": "servers.view",
    "ShardMap": "shards.view",
    "Stage": "stage.view",
    "Tensors": "tensors.view",
    "Timeline": "timeline.view",
    "to_html": "widget.page",
}


def __getattr__(name: str) -> Any:
    """Load a view when it is first used: widgets take a while to import."""
    if name in _HOMES:
        return getattr(importlib.import_module(f"distkit.views.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
