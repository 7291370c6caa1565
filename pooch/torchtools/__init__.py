"""What both the profiler and the executor have to know about torch: operators, storages, memory meters, random
state.
"""
