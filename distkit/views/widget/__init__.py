"""Shared parts of all widgets: live updates, static pictures, pages, browser modules."""
