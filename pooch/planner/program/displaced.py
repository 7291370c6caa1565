"""The compute that copies displace."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ...ir import Profile


@dataclass(frozen=True, slots=True)
class Displaced:
    """What copies in one direction take of the compute stream, at least.

    Compute advances at rate 1 / (1 + share) while bytes move, so a ms of that displaces share / (1 + share) of it; two
    copies at once displace less than the sum of both alone, so both shares are in the divisor.

    Attributes:
        latency_ms: of each copy, which displaces nothing.
        share: of each ms in which bytes move.
        begin_ms: what it takes to start a copy.
    """

    latency_ms: float
    share: float
    begin_ms: float

    def by(self, copy_ms: float) -> float:
        """Return what a whole copy displaces that takes so long."""
        return self.begin_ms + self._moving(copy_ms)

    def least_share(self, copies_ms: Iterable[float]) -> float:
        """Return what each ms displaces in which such copies run, but for the last one: it may have its latency alone
        there.

        What it takes to start a copy is not in it, as a copy may start long before it runs.
        """
        return min((self._moving(copy_ms) / copy_ms for copy_ms in copies_ms if copy_ms > 0), default=0.0)

    def _moving(self, copy_ms: float) -> float:
        return max(0.0, copy_ms - self.latency_ms) * self.share


def displaced(profile: Profile) -> tuple[Displaced, Displaced]:
    """Return what copies out displace, and what copies in do. On a CPU, whoever computes also starts them."""
    link = profile.link
    both = 1 + link.out_compute_share + link.in_compute_share
    begin_ms = 0.0 if profile.device.has_streams else profile.hooks.copy_ms
    return (
        Displaced(link.out_latency_ms, link.out_compute_share / both, begin_ms),
        Displaced(link.in_latency_ms, link.in_compute_share / both, begin_ms),
    )
