"""The space-time diagram."""
