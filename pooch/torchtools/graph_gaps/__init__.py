"""Gaps inside of compiled graphs: what a graph saves leaves within it, and comes back within its backward graph."""

from __future__ import annotations
