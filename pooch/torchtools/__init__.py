"""What both the profiler and the executor need from torch: operators, storages, memory meters, random state."""
