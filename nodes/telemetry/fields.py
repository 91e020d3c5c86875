"""Define what is sampled, and the owners of the series: a GPU's twelve fields, and its host's values."""

from __future__ import annotations

from portal.series.codec import POINTS
from portal.series.store import Owner

GPU_FIELDS = (
    "gpu_percent",
    "sm_percent",
    "memory_mib",
    "temperature_c",
    "memory_temperature_c",
    "watts",
    "sm_mhz",
    "throttle",
    "nvlink_tx_mib",
    "nvlink_rx_mib",
    "pcie_tx_mib",
    "pcie_rx_mib",
)
PLACE = {name: place for place, name in enumerate(GPU_FIELDS)}
NEWEST = ("gpu_percent", "memory_mib", "temperature_c", "watts", "throttle")
"""The newest values of each GPU that are stored in the machine's row, for maps of the whole cluster."""

MAX_SPAN_S = 36_000
"""The longest span of a frame: 600 samples, a minute apart."""

WINDOW_S = POINTS
"""Seconds of a machine that are merged into chunks together, aligned to multiples."""


def gpu_owner(gpu_id: int) -> Owner:
    """Return the owner of a GPU's series; a step is a Unix second."""
    return ("gpu", gpu_id)


def host_owner(agent_id: int) -> Owner:
    """Return the owner of a machine's other series."""
    return ("node", agent_id)
