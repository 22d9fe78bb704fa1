"""Displays static pictures in notebooks; the pictures remain visible without a kernel.

A view has two cell outputs: a picture, which every front end can show, and the widget, which needs
its kernel. A style sheet in the first output selects the visible one: the picture, if no widget is
drawn. With a single output, JupyterLab would prefer the widget even if it only shows "model not
found", and nbconvert would load a widget manager from the network.
"""

from __future__ import annotations

import base64
import threading
from collections.abc import Callable
from functools import partial
from html import escape
from typing import Any

from distkit.views.scene import svg

#: The output with the picture, in JupyterLab, Notebook and nbconvert pages.
_PICTURE = ".jp-OutputArea-child:has(> .jp-OutputArea-output > .distkit-still)"
#: A drawn widget: elements created by JupyterLab or by a page's widget manager.
_DRAWN = ":is(.jp-OutputArea-output > .lm-Widget > *, .widget-subarea > * > *)"
#: A widget that has no model after its kernel has exited.
_UNKNOWN = "+ .jp-OutputArea-child > .jp-OutputArea-output.jupyter-widgets"
_STYLE = (
    f"{_PICTURE}:has(+ .jp-OutputArea-child {_DRAWN}), "
    f"{_PICTURE} + .jp-OutputArea-child:not(:has({_DRAWN})), .distkit-ended {{ display: none; }} "
    f"{_PICTURE}:has({_UNKNOWN}) .distkit-ended {{ display: block; }}"
)
#: Shown below views of unfinished runs. GitHub removes styles, so it must be correct without them.
_ENDED = '<div class="distkit-ended">the kernel has stopped</div>'
#: A picture follows the notebook's color theme, not the operating system's.
_SCHEME = (
    ".distkit-picture { color-scheme: light; } "
    'body:is([data-jp-theme-light="false"], .vscode-dark) .distkit-picture { color-scheme: dark; }'
)

#: Hides the widget of a folded view, which is in the next output, and styles the summary line that
#: replaces it. The open line shows the widget, or the picture if no widget is drawn.
_FOLDED = (
    f"""
.jp-OutputArea-child:has(.distkit-folded:not([open])) + .jp-OutputArea-child,
.jp-OutputArea-child:has(.distkit-folded) + .jp-OutputArea-child:not(:has({_DRAWN})),
.jp-OutputArea-child:has(+ .jp-OutputArea-child {_DRAWN}) .distkit-folded > img
{{ display: none; }}
"""
    + """
details.distkit-folded { max-width: 1600px; margin: 4px 0; border-radius: 12px;
  border: 1px solid var(--jp-border-color2, #c8ced4);
  font: 13px/1.45 var(--jp-ui-font-family, sans-serif); }
.jp-RenderedHTMLCommon > details.distkit-folded { margin-right: -20px; }
.distkit-folded summary { padding: 7px 66px 7px 18px; cursor: pointer; position: relative;
  list-style-position: inside; white-space: nowrap; overflow: hidden; text-overflow: ellipsis; }
.distkit-folded summary::after { content: "show"; position: absolute; right: 18px; font-weight: 600;
  color: var(--jp-content-link-color, #0072b2); }
.distkit-folded[open] summary::after { content: "hide"; }
"""
)


class NotebookSnapshot:
    """The static picture next to a widget.

    Args:
        draw: returns the current picture as SVG, and plain text for terminals.
        is_live: returns whether the run shown is still in progress.
    """

    def __init__(
        self, draw: Callable[[], tuple[str, str]], is_live: Callable[[], bool] = lambda: False
    ) -> None:
        self._draw, self._is_live, self._handle = draw, is_live, None
        self._line = ""  # the line of a folded view
        self._send_lock = threading.Lock()

    def show(self, widget: dict[str, Any], metadata: dict[str, Any] | None = None) -> None:
        """Display the picture and the widget in the current cell.

        Args:
            widget: the result of the widget's ``_repr_mimebundle_``.
            metadata: metadata of this bundle.
        """
        from IPython.display import display

        view = {kind: value for kind, value in widget.items() if kind.endswith("+json")}
        with self._send_lock:  # a concurrent refresh() must wait
            self._handle = display(self.bundle(), raw=True, display_id=True)
        if view:  # empty HTML for front ends without widgets
            display({**view, "text/html": ""}, raw=True, metadata=metadata or {})

    def refresh(self) -> None:
        """Update the displayed picture, if any.

        Thread-safe; pictures are displayed in the order in which they are drawn.
        """
        self._replace(self.bundle)

    def fold(self, line: str) -> None:
        """Replace the picture and the widget with one line that expands to them."""
        self._line = line
        self.refresh()

    def remove(self) -> None:
        """Remove the picture and the widget from the notebook."""
        self._replace(lambda: _REMOVED)

    def _replace(self, bundle: Callable[[], dict[str, str]]) -> None:
        with self._send_lock:
            if self._handle is not None:
                self._handle.update(bundle(), raw=True)

    def bundle(self) -> dict[str, str]:
        """Return the picture for all front ends."""
        drawn, text = self._draw()
        if line := self._line:
            return as_picture(drawn, line, wrap=partial(_fold_html, line))
        return as_picture(drawn, text, wrap=self._without_widget)

    def _without_widget(self, html: str) -> str:
        """Wrap HTML so that it is visible only without the widget."""
        return (
            f'<div class="distkit-still"><style>{_STYLE}</style>{html}'
            f"{_ENDED * self._is_live()}</div>"
        )


def _fold_html(line: str, html: str) -> str:
    """Return a line that expands to ``html``."""
    return (
        f'<style>{_FOLDED}</style><details class="distkit-folded"><summary>{escape(line)}'
        f"</summary>{html}</details>"
    )


_REMOVED = {
    "text/html": f'<style>{_FOLDED}</style><span class="distkit-folded"></span>',
    "text/plain": "",
}


class HtmlSnapshot(NotebookSnapshot):
    """A snapshot whose ``draw`` returns HTML instead of SVG.

    ``standalone`` is True if there is no widget.
    """

    standalone = False

    def bundle(self) -> dict[str, str]:
        """Return the HTML for all front ends."""
        html, text = self._draw()
        return {
            "text/html": html if self.standalone else self._without_widget(html),
            "text/plain": text,
        }


def as_picture(drawn: str, text: str, wrap: Callable[[str], str] = str) -> dict[str, str]:
    """Return a picture for all front ends.

    The image is embedded in HTML, so that it follows JupyterLab's theme and is visible in untrusted
    notebooks.

    Args:
        drawn: the picture as SVG.
        text: the picture as text for terminals; its first line describes the image.
        wrap: wraps the HTML of the image.
    """
    encoded = base64.b64encode(svg.themed(drawn).encode()).decode("ascii")
    image = (
        f'<img class="distkit-picture" alt="{escape(text.partition(chr(10))[0])}" '
        f'style="max-width:100%" src="data:image/svg+xml;base64,{encoded}">'
    )
    return {
        "text/html": wrap(f"<style>{_SCHEME}</style>{image}"),
        "image/svg+xml": drawn,
        "text/plain": text,
    }
