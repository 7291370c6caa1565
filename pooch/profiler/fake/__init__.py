"""Mode "fake": a profile from tensors that have shapes but neither memory nor data."""

from pooch.profiler.fake.measured import MeasuredCosts
from pooch.profiler.fake.modelled import ModelledCosts
from pooch.profiler.fake.profiler import FakeSetting, profile_fake_step
from pooch.profiler.fake.world import FakeWorld

__all__ = ["FakeSetting", "FakeWorld", "MeasuredCosts", "ModelledCosts", "profile_fake_step"]
