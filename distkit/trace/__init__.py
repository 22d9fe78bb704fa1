"""The trace of a run: its events, operations and messages, and the file format."""
