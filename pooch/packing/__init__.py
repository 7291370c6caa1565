"""Placing blocks with known lifetimes in one arena: dynamic storage allocation."""

from ..ir.layout import Block, Layout, bound_of
from ..ir.layout_check import verify
from .policies import POLICIES, pack

__all__ = ["POLICIES", "Block", "Layout", "bound_of", "pack", "verify"]
