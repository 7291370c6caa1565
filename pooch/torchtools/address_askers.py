"""Code of other libraries that is known to ask for addresses of tensors and to keep none of them.

What saves a model in the format of safetensors compares the addresses of all its tensors, to find those that share
memory, and then reads from each address until the file is written.
"""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass, field
from traceback import walk_stack
from types import FrameType

_OWN = {__name__.partition(".")[0], "torch"}  # the stand-ins, and methods of PyTorch that ask for their caller
_COMPARING = {
    "safetensors.torch": {"storage_ptr", "_end_ptr", "_filter_shared_not_shared", "_is_complete"},
    "huggingface_hub.serialization._torch": {
        "storage_ptr", "_get_unique_id", "_end_ptr", "_filter_shared_not_shared", "_is_complete",
    },
    "transformers.pytorch_utils": {"id_tensor_storage", "storage_ptr"},
    "transformers.modeling_utils": {"_end_ptr", "_find_disjoint", "_find_identical"},
    "accelerate.utils.modeling": {"id_tensor_storage"},
}  # fmt: skip
_READING = {"safetensors.torch": {"_to_ndarray", "_tobytes"}}


@dataclass(frozen=True, slots=True)
class RunningCall:
    """A call that reads from addresses as long as it lasts.

    Attributes:
        frame: Its frame.
        thread: The thread that it runs in.
    """

    frame: FrameType = field(repr=False)
    thread: int

    def has_ended(self) -> bool:
        """Whether it has returned."""
        frame = sys._current_frames().get(self.thread)
        return frame is None or all(each is not self.frame for each, _ in walk_stack(frame))


def compares_addresses() -> bool:
    """Whether who asks for an address now compares it with others, and does nothing else with it."""
    return _is_among(_asker(), _COMPARING)


def reading_call() -> RunningCall | None:
    """The call that asks for an address now, if it is known to use none after it has returned."""
    asker = _asker()
    if asker is None or not _is_among(asker, _READING):
        return None
    module = asker.f_globals["__name__"]
    *_, outermost = (frame for frame, _ in walk_stack(asker) if frame.f_globals.get("__name__") == module)
    return RunningCall(outermost, threading.get_ident())


def _asker() -> FrameType | None:
    """The innermost frame of neither Pooch nor PyTorch."""
    frames = (frame for frame, _ in walk_stack(sys._getframe(1)))
    return next((each for each in frames if str(each.f_globals.get("__name__")).partition(".")[0] not in _OWN), None)


def _is_among(asker: FrameType | None, known: dict[str, set[str]]) -> bool:
    return asker is not None and asker.f_code.co_name in known.get(str(asker.f_globals.get("__name__")), ())
