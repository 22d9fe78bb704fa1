"""The parts that all widgets share: live updates, saved pictures, pages, browser modules."""
