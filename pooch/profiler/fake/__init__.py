"""Mode "fake": a profile from tensors that have shapes but neither memory nor data."""

from .measured import MeasuredCosts
from .modelled import ModelledCosts
from .profiler import FakeSetting, profile_fake_step
from .world import FakeWorld

__all__ = ["FakeSetting", "FakeWorld", "MeasuredCosts", "ModelledCosts", "profile_fake_step"]
