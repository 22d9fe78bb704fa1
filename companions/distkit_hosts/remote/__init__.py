"""Ranks on other machines: a tunnel to an agent on each, which forks them there."""
