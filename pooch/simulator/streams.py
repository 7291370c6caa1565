"""The two copy streams and the compute stream that they slow down."""

from __future__ import annotations

from collections import deque

from ..ir import Link


class CopyStream:
    """Copies in order of issue, one after the other.

    Attributes:
        busy: (start, end) in ms of when bytes move that compute may still meet, in order.
        free_ms: when the last one issued so far ends.
    """

    def __init__(self) -> None:
        self.busy: deque[tuple[float, float]] = deque()
        self.free_ms = 0.0

    def issue(self, now_ms: float, latency_ms: float, duration_ms: float) -> tuple[float, float]:
        """Queue one copy, whose bytes move after its latency; returns when it starts and ends."""
        start_ms = max(now_ms, self.free_ms)
        self.free_ms = start_ms + duration_ms
        self.busy.append((start_ms + latency_ms, self.free_ms))
        return start_ms, self.free_ms


class Streams:
    """Copies in two directions, in one queue where the link is half duplex, and what they take of compute."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._out = CopyStream()
        self._in = CopyStream()
        self._free = link.out_compute_share == 0 and link.in_compute_share == 0

    def copy_out(self, now_ms: float, size_bytes: int, *, packs: bool = False) -> tuple[float, float]:
        """Issue a copy to the tier; returns (start, end) in ms."""
        duration_ms = self._link.out_ms(size_bytes, packs=packs)
        return self._issue(self._out, self._in, now_ms, self._link.out_latency_ms, duration_ms)

    def copy_in(self, now_ms: float, size_bytes: int, *, packs: bool = False) -> tuple[float, float]:
        """Issue a copy back; returns (start, end) in ms."""
        duration_ms = self._link.in_ms(size_bytes, packs=packs)
        return self._issue(self._in, self._out, now_ms, self._link.in_latency_ms, duration_ms)

    def _issue(
        self, stream: CopyStream, other: CopyStream, now_ms: float, latency_ms: float, duration_ms: float
    ) -> tuple[float, float]:
        if not self._link.full_duplex:  # one queue: wait for the other direction too
            stream.free_ms = max(stream.free_ms, other.free_ms)
        return stream.issue(now_ms, latency_ms, duration_ms)

    def compute(self, now_ms: float, work_ms: float) -> float:
        """When `work_ms` of compute ends that starts now and is slowed down while bytes move."""
        if self._free or not (self._out.busy or self._in.busy):
            return now_ms + work_ms
        while work_ms > 0:
            slowdown, until_ms = self._rate(now_ms)
            if until_ms - now_ms >= work_ms * slowdown:
                return now_ms + work_ms * slowdown
            work_ms -= (until_ms - now_ms) / slowdown
            now_ms = until_ms
        return now_ms

    def _rate(self, now_ms: float) -> tuple[float, float]:
        """The factor by which compute is slowed down now, and until when."""
        slowdown, until_ms = 1.0, float("inf")
        shares = ((self._out, self._link.out_compute_share), (self._in, self._link.in_compute_share))
        for stream, share in shares:
            while stream.busy and stream.busy[0][1] <= now_ms:
                stream.busy.popleft()
            if stream.busy:
                start_ms, end_ms = stream.busy[0]
                runs = start_ms <= now_ms
                slowdown += share if runs else 0.0
                until_ms = min(until_ms, end_ms if runs else start_ms)
        return slowdown, until_ms
