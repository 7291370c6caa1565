"""Examines a machine: whether Pooch keeps its promises here, and what is in its way."""

from .examination import LIMIT_S, Examination, examine
from .finding import Finding

__all__ = ["LIMIT_S", "Examination", "Finding", "examine"]
