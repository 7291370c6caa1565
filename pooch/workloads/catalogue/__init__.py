"""The built-in workloads by name, with their published sizes. Data alone: this loads no model and no torch."""

from pooch.workloads.catalogue.images import IMAGES
from pooch.workloads.catalogue.sequences import SEQUENCES
from pooch.workloads.catalogue.volumes import VOLUMES
from pooch.workloads.registry import BuiltIn

BUILT_IN: dict[str, BuiltIn] = {entry.name: entry for entry in (*IMAGES, *VOLUMES, *SEQUENCES)}

__all__ = ["BUILT_IN"]
