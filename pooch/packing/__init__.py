"""Placing blocks with known lifetimes in one arena: dynamic storage allocation."""

from .blocks import Block, Layout, bound_of
from .policies import POLICIES, pack
from .verifier import verify

__all__ = ["POLICIES", "Block", "Layout", "bound_of", "pack", "verify"]
