"""What a step does with its values, without torch: where each value is, how it moves, and who leaves under pressure.

Storages are opaque here, and copies, recipes and the account of bytes are handed in. `executor` hands in real ones;
`tests/machine` hands in modelled ones with a clock, and drives the same code through random programs and faults.
"""

from .lock import StepLock
from .pressure import Pressure
from .recipes import Call, Recipes
from .speed import CopySpeed
from .store import Store
from .values import Level, Value, Witness

__all__ = ["Call", "CopySpeed", "Level", "Pressure", "Recipes", "StepLock", "Store", "Value", "Witness"]
