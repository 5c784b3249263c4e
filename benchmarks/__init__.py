"""Figures, each measured by one script against the public API. See ``python -m benchmarks.run``."""
