"""Recording of each rank's communication: calls, their order and their results."""
