"""A function that never returns, for a fork server that is busy."""

import threading


def wait() -> None:
    threading.Event().wait()
