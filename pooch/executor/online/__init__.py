"""Steps without a plan: saved activations leave when live bytes would pass the budget, and come back when read."""

from .evictor import Evictor
from .live_bytes import live_bytes_of
from .step import OnlineStep

__all__ = ["Evictor", "OnlineStep", "live_bytes_of"]
