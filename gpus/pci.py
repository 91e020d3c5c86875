"""Addresses of PCI devices, which driver, kernel and `nvidia-smi` write each in a way of their own."""

from __future__ import annotations


def place(bus: str) -> str:
    """A PCI address as domain:bus:device, however it was written; "" for what is none."""
    numbers = bus.partition(".")[0].split(":")
    try:
        domain, second, third = (int(number, 16) for number in [*["0"] * (3 - len(numbers)), *numbers])
    except ValueError:
        return ""
    return f"{domain:04x}:{second:02x}:{third:02x}"
