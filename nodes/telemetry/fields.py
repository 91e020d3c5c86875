"""What is sampled, and whose series it becomes: a GPU's twelve fields, and what its machine tells of itself."""

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
"""What is kept of each GPU's newest sample beside the machine's row, for maps of the whole cluster."""

LONGEST_S = 36_000
"""What a frame may span at most: 600 samples, a minute apart."""

WINDOW_S = POINTS
"""Seconds of a machine that become chunks together, aligned to its multiples."""


def gpu_owner(gpu_id: int) -> Owner:
    """The owner under which a GPU's series are kept; a step is a Unix second."""
    return ("gpu", gpu_id)


def host_owner(agent_id: int) -> Owner:
    """The owner of what a machine tells of itself besides its GPUs."""
    return ("node", agent_id)
