"""The picture in a notebook that stays when the kernel is gone.

A view is two outputs of its cell: a picture, which every front end can show, and the widget,
which no front end can show without its kernel. A style sheet in the first decides which of
the two is seen: the picture until the widget is drawn, and again when there is none. In one
output, JupyterLab would prefer the widget even where all it can say is "model not found", and
nbconvert would fetch a widget manager from the network.
"""

from __future__ import annotations

import base64
import threading
from collections.abc import Callable
from html import escape
from typing import Any

#: The output with the picture, in JupyterLab, in Notebook and in pages that nbconvert makes.
_PICTURE = ".jp-OutputArea-child:has(> .jp-OutputArea-output > .distkit-still)"
#: A widget that is drawn: what JupyterLab, and the widget manager of such a page, put there.
_DRAWN = ":is(.jp-OutputArea-output > .lm-Widget > *, .widget-subarea > * > *)"
_STYLE = (
    f"{_PICTURE}:has(+ .jp-OutputArea-child {_DRAWN}), "
    f"{_PICTURE} + .jp-OutputArea-child:not(:has({_DRAWN})) {{ display: none; }}"
)


class NotebookSnapshot:
    """The static picture beside a widget.

    Args:
        draw: makes the picture as it is now, SVG, and a text for terminals.
    """

    def __init__(self, draw: Callable[[], tuple[str, str]]) -> None:
        self._draw, self._handle = draw, None
        self._sending = threading.Lock()

    def show(self, widget: dict[str, Any], metadata: dict[str, Any] | None = None) -> None:
        """Display the picture and the widget in the cell that runs.

        Args:
            widget: what the widget's ``_repr_mimebundle_`` returned.
            metadata: of that.
        """
        from IPython.display import display

        view = {kind: value for kind, value in widget.items() if kind.endswith("+json")}
        with self._sending:  # what is renewed meanwhile is sent after it
            self._handle = display(self.bundle(), raw=True, display_id=True)
        # the empty HTML is for those that show no widgets
        display({**view, "text/html": ""}, raw=True, metadata=metadata or {})

    def renew(self) -> None:
        """Put the picture as it is now into the notebook, if it was displayed there.

        From any thread: of several at once, the last to look at what is drawn is the last to send.
        """
        with self._sending:
            if self._handle is not None:
                self._handle.update(self.bundle(), raw=True)

    def bundle(self) -> dict[str, str]:
        """The picture for every kind of front end.

        As an image in HTML it is shown in notebooks that are not trusted, too.
        """
        drawn, text = self._draw()
        letters = base64.b64encode(drawn.encode()).decode("ascii")
        image = (
            f'<img alt="{escape(text.partition(chr(10))[0])}" style="max-width:100%" '
            f'src="data:image/svg+xml;base64,{letters}">'
        )
        return {
            "text/html": f'<div class="distkit-still"><style>{_STYLE}</style>{image}</div>',
            "image/svg+xml": drawn,
            "text/plain": text,
        }
