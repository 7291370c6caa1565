"""The version of this package; that in `pyproject.toml` is the same."""

VERSION = "0.1.0"
