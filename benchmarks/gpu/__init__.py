"""Everything that can only be shown on a GPU, in one command: `python -m benchmarks.gpu` (`make gpu`)."""
