"""Mode "fake": a profile from tensors that have shapes but no memory and no data."""

from pooch.profiler.fake.costs import OpCost, OpCosts
from pooch.profiler.fake.measured import MeasuredCosts
from pooch.profiler.fake.modelled import ModelledCosts
from pooch.profiler.fake.profile_step import FakeSetting, profile_fake_step
from pooch.profiler.fake.world import FakeWorld

__all__ = ["FakeSetting", "FakeWorld", "MeasuredCosts", "ModelledCosts", "OpCost", "OpCosts", "profile_fake_step"]
