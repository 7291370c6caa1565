from __future__ import annotations

from tests.executor.conftest import decide_on_everything, frozen_heap, one_thread

__all__ = ["decide_on_everything", "frozen_heap", "one_thread"]
