"""Devices that steps can be modelled for: a catalogue of data sheets and measured devices. No torch."""

from .catalogue import find_device, known_devices, read_catalogue, user_catalogue, write_device
from .model import DeviceModel, Efficiency, LinkModel, PeersModel

__all__ = [
    "DeviceModel",
    "Efficiency",
    "LinkModel",
    "PeersModel",
    "find_device",
    "known_devices",
    "read_catalogue",
    "user_catalogue",
    "write_device",
]
