"""The trace of a run: events in columns, operations and messages, files."""
