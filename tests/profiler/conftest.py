from __future__ import annotations

from tests.executor.conftest import decide_on_everything, one_thread

__all__ = ["decide_on_everything", "one_thread"]
