"""Training scripts as people write them, each run plainly and with Pooch: `python -m benchmarks.setups`."""
