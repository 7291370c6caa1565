"""Where the stages meet: profile a step, plan it, simulate it, run it under the plan, and guard the run.

Importing this imports no torch: what needs it is imported when it is called, so saved profiles can be planned and
simulated on any laptop.
"""
