"""List the faults of a game day, and what Vigil must make of each. No Django."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

BASELINE = "none"


@dataclass(frozen=True)
class Fault:
    """A fault and the right response.

    A fault of a rank has a job. `causes`: right verdicts; none: nothing fails. `resumes`: the job must continue by
    itself. A fault of a node is planted by the node's agent, for so many `seconds`. `rules`: the health rules of which
    one must notice it; `drains`: the node must be drained, or its drain proposed.
    """

    title: str
    causes: frozenset[str] = frozenset()
    resumes: bool = False
    rules: frozenset[str] = frozenset()
    seconds: float = 0
    drains: bool = False

    @property
    def is_node_fault(self) -> bool:
        return bool(self.rules)


FAULTS: Mapping[str, Fault] = {
    BASELINE: Fault("Undisturbed run"),
    "kill": Fault("A rank is killed", frozenset({"unknown"}), resumes=True),
    "stop": Fault("A rank stops", frozenset({"collective.timeout"}), resumes=True),
    "exception": Fault("The program raises an exception", frozenset({"program.exception"})),
    "disk": Fault("The scratch disk is full", frozenset({"storage.full"})),
    # On one node, a reset connection may as well be that of a process that ended.
    "network": Fault("A rank's network is cut", frozenset({"network.fabric", "unknown"}), resumes=True),
    "xid": Fault("A GPU falls off the bus (Xid 79)", rules=frozenset({"off-bus"}), seconds=60, drains=True),
    # The agent notices silence of 15 s, the rule one of 60 s.
    "nvml": Fault("The NVIDIA driver hangs", rules=frozenset({"nvml-hung"}), seconds=100, drains=True),
    # Probed every 10 s; the rule waits for a minute. Where fewer than three nodes mount it, it is slow on most of them.
    "mount": Fault("A mount is slow", rules=frozenset({"mount-slow", "file-system-slow"}), seconds=120),
}
"""In the order in which they are planted; the undisturbed run is first, because losses are compared to its losses."""
