"""All loops, by their names."""

from benchmarks.loops import frameworks, higher_order, pytorch_sequences, pytorch_vision
from benchmarks.loops.loop import LOOPS, NEEDS

MODULES = (pytorch_vision, pytorch_sequences, higher_order, frameworks)

__all__ = ["LOOPS", "MODULES", "NEEDS"]
