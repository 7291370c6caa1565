"""Python's collector of garbage comes as often as it would without Pooch.

It comes after so many objects were made beyond those that have ended, and looks at all of the process's now and then,
which takes longer than a step of a small model. What a step keeps for its saved tensors are thousands of objects, which
end with it, and none of which is garbage.
"""

from __future__ import annotations

import gc
import threading


class Leeway:
    """How many more objects there may be before the collector comes. One for the process: see `LEEWAY`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._objects = self._threshold = 0

    def set(self, objects: int) -> None:
        """Let there be so many more objects than the program has asked for. 0: none.

        What the program sets itself meanwhile is kept. A collector that is off stays so.
        """
        if not (objects or self._objects):
            return
        with self._lock:
            threshold, *others = gc.get_threshold()
            if self._objects and threshold == self._threshold:
                if objects == self._objects:
                    return
                threshold -= self._objects
            self._objects = objects if threshold else 0
            self._threshold = threshold + self._objects
            gc.set_threshold(self._threshold, *others)


LEEWAY = Leeway()
