"""Excludes the scripts that the program suite runs."""

collect_ignore = ["programs/scripts"]
