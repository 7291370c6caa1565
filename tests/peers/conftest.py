from tests.autopilot.conftest import decide_on_everything, nothing_is_left_behind, one_thread

__all__ = ["decide_on_everything", "nothing_is_left_behind", "one_thread"]
