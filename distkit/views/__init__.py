"""Pictures of a trace: pure projections, with a painter for the browser and a static one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distkit.companions import attributes

if TYPE_CHECKING:
    from distkit.views.cockpit.scene import Cockpit
    from distkit.views.compare.view import Compare
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

_HOMES = {
    "Cockpit": "cockpit.scene",
    "Compare": "compare.view",
    "Gradients": "scenes",
    "Servers": "scenes",
    "Stage": "scenes",
    "Tensors": "scenes",
    "Timeline": "timeline.view",
    "to_html": "widget.page",
}


#: A view is loaded when it is first used: widgets take a while to import.
__getattr__ = attributes(__name__, {n: f"{__name__}.{home}" for n, home in _HOMES.items()})
