"""Draws traces: pure projections, rendered in the browser or as static pictures."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distkit.imports import attributes

if TYPE_CHECKING:
    from distkit.views.cockpit import Cockpit
    from distkit.views.compare import Compare
    from distkit.views.scenes import Gradients, Servers, Stage, Tensors
    from distkit.views.timeline.view import Timeline
    from distkit.views.widget.page import to_html

__all__ = [
    "Cockpit",
    "Compare",
    "Gradients",
    "Servers",
    "Stage",
    "Tensors",
    "Timeline",
    "to_html",
]

_MODULES = {
    "Cockpit": "cockpit",
    "Compare": "compare",
    "Gradients": "scenes",
    "Servers": "scenes",
    "Stage": "scenes",
    "Tensors": "scenes",
    "Timeline": "timeline.view",
    "to_html": "widget.page",
}


#: Views are imported on first use, because widgets are slow to import.
__getattr__ = attributes(__name__, {n: f"{__name__}.{module}" for n, module in _MODULES.items()})
