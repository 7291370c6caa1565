"""The largest batch, volume or sequence that fits into a budget."""
