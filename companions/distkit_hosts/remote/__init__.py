"""Ranks on other machines: an agent forks them there, and a tunnel connects it to the kernel."""
