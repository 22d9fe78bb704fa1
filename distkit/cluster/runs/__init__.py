"""One run of a program: its handle, its outcome, stepping, the watch over deadlocks."""
