"""What follows from a profile without running anything: dataflow, occupancy of memory, sharing of storages."""
