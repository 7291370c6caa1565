"""A plan as one HTML file: charts, table and a slider over budgets. It opens from disk and loads nothing."""
