"""Ranks that are modelled: what is asked for, and the profile of one of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..ground.errors import UsageError
from ..ir import Profile
from ..ir.modelled_ranks import ShardingKind

if TYPE_CHECKING:
    from ..analysis.sharding import PeerLink
    from ..devices import DeviceModel
    from ..workloads import Workload

_LATENCY_US = 20.0


@dataclass(frozen=True, slots=True)
class RanksOptions:
    """Ranks to model, on a device model each.

    Attributes:
        ranks: number of them, at least 2.
        kind: "fsdp": parameters, gradients and optimizer state are divided among them, as by FSDP2; "ddp": each has
            all of them.
        unit: name of the class of modules that are gathered together; None: the modules of the model's lists.
        link_gb_per_s: rate between devices each way, in 10^9 bytes per second; None: that of the device model.

    Raises:
        UsageError: a number is out of range.
    """

    ranks: int
    kind: ShardingKind = "fsdp"
    unit: str | None = None
    link_gb_per_s: float | None = None

    def __post_init__(self) -> None:
        if self.ranks < 2:
            raise UsageError(f"{self.ranks} ranks to model: give at least 2")
        if self.kind not in ("fsdp", "ddp"):
            raise UsageError(f"sharding {self.kind!r}: give fsdp or ddp")
        if self.unit is not None and self.kind == "ddp":
            raise UsageError("ddp has no units that are gathered: leave --unit out, or give --sharding fsdp")
        rate = self.link_gb_per_s
        if rate is not None and not (math.isfinite(rate) and rate > 0):
            raise UsageError(f"the link between ranks has {rate} GB/s: give a positive number")

    def check(self, device_model: DeviceModel | None, *, accumulate: bool) -> None:
        """Check what does not depend on the model, before anything is built.

        Raises:
            UsageError: no device model is given, its link to other devices is not known, or gradients accumulate.
        """
        if device_model is None:
            raise UsageError("ranks are modelled on a device that is modelled as well: add --device-model")
        if accumulate:
            raise UsageError("ranks whose gradients live throughout the step are not modelled: leave --accumulate out")
        self._link(device_model)

    def one_of(self, profile: Profile, workload: Workload, device_model: DeviceModel | None) -> Profile:
        """The profile of one rank, from that of a single device.

        Raises:
            UsageError: the model has no such units, or runs them in a way that is not modelled.
        """
        from ..analysis.one_rank import one_rank
        from ..analysis.sharding import Sharding
        from ..profiler.fake.units import units_of
        from ..profiler.persistent import foreseen_state, state_bytes

        assert device_model is not None  # `check` came first
        optimizer = workload.optimizer
        units = units_of(workload.model, self.ranks, self.unit, divided=self.kind == "fsdp")
        sharding = Sharding(
            kind=self.kind,
            ranks=self.ranks,
            units=units,
            state_bytes=state_bytes(optimizer) + foreseen_state(optimizer, workload.model).to_come_bytes,
            link=self._link(device_model),
            copy_bytes_per_ms=device_model.bytes_per_ms,
        )
        return one_rank(profile, sharding)

    def _link(self, device_model: DeviceModel) -> PeerLink:
        from ..analysis.sharding import PeerLink

        peers, rate = device_model.peers, self.link_gb_per_s
        latency_ms = (_LATENCY_US if peers is None else peers.latency_us) / 1000
        if rate is not None:
            return PeerLink("given", rate * 1e6, latency_ms)
        if peers is None:
            raise UsageError(
                f"how fast several {device_model.name} reach each other is not known: give --link-gbps, in 10^9 bytes "
                "per second each way"
            )
        return PeerLink(peers.name, peers.gb_per_s * device_model.efficiency.link * 1e6, latency_ms)
