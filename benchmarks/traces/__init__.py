"""What others published as inputs: operator logs, packing instances, budgets of their planners."""
