"""The `pooch` command, for tests of what it writes."""

from tests.cli.conftest import pooch_command

__all__ = ["pooch_command"]
