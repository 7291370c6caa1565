"""Side-by-side measurements: what the README quotes, and the commands that print it."""
