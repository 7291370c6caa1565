"""What a step does with its values, without torch: where each value is, how it moves, and who leaves under pressure.

Storages are opaque here, and copies, recipes and the account of bytes are handed in. `executor` hands in real ones.
`simulator` hands in modelled ones, and drives the same code through the ops of a profile;
`tests/machine` adds contents and faults to them, and drives it through random programs.
"""

from .eviction import EvictionPolicy
from .lock import StepLock
from .pressure import Pressure
from .recipes import Call, Recipes
from .speed import CopySpeed, Lane
from .store import Store
from .values import Level, Value, Witness

__all__ = [
    "Call",
    "CopySpeed",
    "EvictionPolicy",
    "Lane",
    "Level",
    "Pressure",
    "Recipes",
    "StepLock",
    "Store",
    "Value",
    "Witness",
]
