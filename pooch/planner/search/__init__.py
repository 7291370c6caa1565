"""The search for a plan around the integer program: bound, starts, rounds, local search, restricted programs."""
