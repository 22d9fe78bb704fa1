"""Processes: how ranks are forked, reached, limited and ended."""
