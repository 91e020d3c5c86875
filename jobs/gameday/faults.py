"""List the faults of a game day, and what Vigil must make of each. No Django."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

BASELINE = "none"


@dataclass(frozen=True)
class Fault:
    """A fault and the right response.

    `causes`: right verdicts; none: nothing fails. `resumes`: the job must continue by itself. `not_tried`: why it is
    not planted on nodes that people use; such a fault has no program.
    """

    title: str
    causes: frozenset[str] = frozenset()
    resumes: bool = False
    not_tried: str = ""


_ONLY_IN_TESTS = "Not tried here: Vigil's own tests plant it, below stand-ins for the driver and the agent's folders."

FAULTS: Mapping[str, Fault] = {
    BASELINE: Fault("Undisturbed run"),
    "kill": Fault("A rank is killed", frozenset({"unknown"}), resumes=True),
    "stop": Fault("A rank stops", frozenset({"collective.timeout"}), resumes=True),
    "exception": Fault("The program raises an exception", frozenset({"program.exception"})),
    "disk": Fault("The scratch disk is full", frozenset({"storage.full"})),
    # On one node, a reset connection may as well be that of a process that ended.
    "network": Fault("A rank's network is cut", frozenset({"network.fabric", "unknown"}), resumes=True),
    "xid": Fault("A GPU falls off the bus (Xid 79)", not_tried=_ONLY_IN_TESTS),
    "nvml": Fault("The NVIDIA driver hangs", not_tried=_ONLY_IN_TESTS),
    "mount": Fault("A mount is slow", not_tried=_ONLY_IN_TESTS),
}
"""In the order in which they are planted; the undisturbed run is first, because losses are compared to its losses."""
