"""Excludes scripts, which the suites run as programs."""

collect_ignore = ["programs/scripts"]
