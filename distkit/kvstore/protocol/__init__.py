"""The protocol of the parameter server, independent of its transport. Pure."""
