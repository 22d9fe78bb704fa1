"""Defines the widgets of the scene views.

The widgets are separate from the scenes, so that replay pages can be written without anywidget.
"""

from __future__ import annotations

from distkit.views import gradients, tensors
from distkit.views.servers import scene as servers
from distkit.views.stage import scene as stage
from distkit.views.widget.view import SceneView


class Stage(SceneView):
    """Animates a run: the messages between ranks, and the contributions to each tensor.

    A strip of numbered chunks shows each rank's tensor. A chunk has a layer in the color of each
    rank whose contribution it contains, and a complete chunk has all colors. A hub in the middle
    represents a torch collective. All messages in a round move together, as in a textbook.
    The space bar plays the run, and the arrow keys step through rounds.

    Args:
        source: a :class:`~distkit.Trace`, or a run that has one.

    Raises:
        TypeError: ``source`` has no trace.

    >>> from distkit import Trace
    >>> from distkit.events import Event, Op, State
    >>> t = Trace([Event(0, 0, Op.SEND, State.STARTED, 0.0, peer=1, nbytes=4),
    ...            Event(1, 0, Op.RECV, State.COMPLETED, 0.1, peer=0, nbytes=4)])
    >>> Stage(t)
    Stage: 2 ranks
      Each strip is a rank's tensor, ...
      before
      rank 0 → rank 1  100 ms · 4 B · 100 ms
    """

    _project = staticmethod(stage.draw)


class Tensors(SceneView):
    """Shows the values of each message and collective, before and after, on every rank.

    A slider selects an operation. Each rank's values are shown as a heat map with their range and
    norm and, for longer tensors, as a histogram. A line reports whether all ranks have the same
    values and, if not, which ranks differ and by how much. If a tensor has more than 64 elements,
    at most 64 evenly spaced elements are shown.

    For a message, *sends next* is the tensor of the same shape that the receiver sends next, and
    *adds* is its difference from the received one: in a reduce-scatter, the receiver's own values.

    Args:
        source: a :class:`~distkit.Trace`, or a run that has one.

    Raises:
        TypeError: ``source`` has no trace.

    >>> from distkit import Trace
    >>> from distkit.events import Event, Op, State, Summary
    >>> ones = Summary((1.0, 1.0), 2**0.5, 1.0, 1.0, 2)
    >>> facts = dict(nbytes=8, shape=(2,), dtype="float32")
    >>> Tensors(Trace([Event(0, 0, Op.SEND, State.STARTED, 0.0, peer=1, summary=ones, **facts),
    ...                Event(1, 0, Op.RECV, State.STARTED, 0.0, peer=0, **facts),
    ...                Event(1, 0, Op.RECV, State.COMPLETED, 0.1, peer=0, summary=ones, **facts)]))
    Tensors: 2 ranks
      rank 0 → rank 1  float32 [2] · at 0 µs
        = rank 1 received the values that rank 0 sent
        values: colors: ±1; rank 0 all 1, norm 1.41; rank 1 all 1, norm 1.41
    """

    _project = staticmethod(tensors.draw)


class Gradients(SceneView):
    """Shows the gradients, the loss and the drift between replicas of a watched training loop.

    For each layer, a table shows the norms and heat maps of the ranks' gradients, of the result of
    the all-reduce, and of a single process's gradient if it was recorded. The table also shows the
    mean cosine similarity over all pairs of ranks' gradients, weighted by the product of their
    norms. Curves show the loss and the drift between replicas.

    Args:
        source: a :class:`~distkit.Trace`, or a run that has one; the program must run its loop
            inside :func:`~distkit.watch_gradients`.

    Raises:
        TypeError: ``source`` has no trace.

    >>> from distkit import Trace
    >>> Gradients(Trace())  # doctest: +ELLIPSIS
    Gradients
      nothing was watched: run the loop inside `with dk.watch_gradients(model) as watch`, ...
    """

    _project = staticmethod(gradients.draw)


class Servers(SceneView):
    """Shows a run with a parameter server in trace time, message by message.

    Each server shows its keys with their versions, and an inbox per key in which gradients wait
    for an update. A gradient carries the version that it was computed from. An update shows the
    workers and staleness of its gradients. Arrows point from a waiting worker to the workers
    that it waits for. The space bar plays the run, the arrow keys step through messages, and
    Page Up and Page Down step through updates.

    Args:
        source: a :class:`~distkit.Trace`, or a run that has one.
        bare: whether to leave out notices, explanations and verdicts.

    Raises:
        TypeError: ``source`` has no trace.

    >>> from distkit import Trace
    >>> Servers(Trace())
    Servers
      this trace has no requests to a parameter server
    """

    _project = staticmethod(servers.draw)
