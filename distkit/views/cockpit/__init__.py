"""A run gone through step by step."""
