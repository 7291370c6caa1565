from __future__ import annotations

import pytest

SLOW_LIMIT_S = 1200


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A slow test may take longer before it counts as hanging."""
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_LIMIT_S))
