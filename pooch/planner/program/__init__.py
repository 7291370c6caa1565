"""The integer program: its variables, its families of rows, and its solver."""
