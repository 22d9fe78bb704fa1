"""From a trace to findings: what went wrong, where, and what to do about it. Pure."""
