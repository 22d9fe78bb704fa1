"""What all widgets share: live updates, saved pictures, pages, browser modules."""
