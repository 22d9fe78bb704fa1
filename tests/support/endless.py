"""A function that never returns, to keep a fork server busy."""

import threading


def wait() -> None:
    threading.Event().wait()
