"""Pooch beside what a user would pick instead, at the peak of each. See `python -m benchmarks.peers --help`."""
