"""The version of this package; that in `pyproject.toml` is the same."""

VERSION = "1.0.0"
