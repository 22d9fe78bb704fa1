"""The protocol of the parameter server, independent of its transport. No side effects."""
