"""The networks of the published experiments that Pooch's own workloads lack, one file each, and their sizes."""

from ...workloads.catalogue import packaged_workloads

WORKLOADS = packaged_workloads(__package__)
