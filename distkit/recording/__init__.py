"""Recording of a rank's communication: its calls, their order and their outcome."""
