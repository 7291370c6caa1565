"""Trains under plans and measures: peaks, times, bits, physical limits, and policies side by side."""
