"""Pictures of a trace: pure projections, with a painter for the browser and a static one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distkit.views.page import to_html
    from distkit.views.timeline import Timeline

__all__ = ["Timeline", "to_html"]


def __getattr__(name: str) -> Any:
    """Load a view when it is first used: widgets take a while to import."""
    if name == "Timeline":
        from distkit.views.timeline import Timeline

        return Timeline
    if name == "to_html":
        from distkit.views.page import to_html

        return to_html
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
