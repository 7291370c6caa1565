"""All loops, by their names."""

from benchmarks.loops import frameworks, higher_order, pytorch_sequences, pytorch_vision
from benchmarks.loops.loop import LOOPS as REGISTERED
from benchmarks.loops.loop import NEEDS, Train

_ORDER = (pytorch_vision, pytorch_sequences, higher_order, frameworks)
LOOPS: dict[str, Train] = {
    name: train for module in _ORDER for name, train in REGISTERED.items() if train.__module__ == module.__name__
}

__all__ = ["LOOPS", "NEEDS"]
