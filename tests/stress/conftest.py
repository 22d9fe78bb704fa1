"""Scripts are run by the suites, not imported."""

collect_ignore = ["programs/scripts"]
