"""The search for a plan around the integer program: rules, bound, rounds, local search, restricted programs, rungs."""
