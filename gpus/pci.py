"""Normalise PCI addresses, which driver, kernel and `nvidia-smi` write differently."""

from __future__ import annotations


def normalised(bus: str) -> str:
    """Return a PCI address as domain:bus:device, however it was written; "" if it is not one."""
    numbers = bus.partition(".")[0].split(":")
    try:
        domain, second, third = (int(number, 16) for number in [*["0"] * (3 - len(numbers)), *numbers])
    except ValueError:
        return ""
    return f"{domain:04x}:{second:02x}:{third:02x}"
