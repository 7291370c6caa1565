"""What follows from a profile without running anything: dataflow, memory occupancy, shared storages, other shapes."""
