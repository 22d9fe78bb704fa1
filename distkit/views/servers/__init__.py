"""A parameter server at work."""
