"""Several runs on one clock."""
