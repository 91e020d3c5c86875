"""Vigil's worker in the test process, on a real Slurm: its scheduler, and the agents of its nodes."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from nodes.cluster import sync
from nodes.models import Node, Reading
from nodes.schedulers.slurm.http import SlurmHttp
from nodes.schedulers.slurm.rest import SlurmRest
from nodes.schedulers.slurm.scheduler import Slurm
from nodes.schedulers.slurm.tokens import KeyFileTokens
from nodes.scheduling import node_states
from tests.nodes.remediation.cluster import AgentFleet
from tests.slurm.cluster import Cluster
from tests.slurm.people import PORTAL, People
from tests.waiting import until

_NODE = re.compile(r"NodeName=(?P<name>\S+) .*? State=(?P<state>\S+) (?:.*? Reason=(?P<reason>.*?) \[\S+@)?")
OUT = ("DOWN", "DRAIN", "FAIL", "REBOOT", "MAINT")


@contextmanager
def scheduler_of(slurm: Cluster) -> Iterator[Slurm]:
    """Open the scheduler as the portal's user, with tokens in that user's name: it has that user's rights."""
    tokens = KeyFileTokens(slurm.layout.jwt_key)
    http = SlurmHttp(slurm.url, tokens=tokens, user=PORTAL)
    yield Slurm(SlurmRest(http), tokens=tokens, user=PORTAL, scontrol=str(slurm.layout.bin / "scontrol"))
    http.close()


@contextmanager
def configured_for_slurm(settings: Any) -> Iterator[None]:
    """Let the worker in this process use Slurm, act on findings, and have a folder of runs that nodes share."""
    settings.VIGIL_SCHEDULER, settings.VIGIL_SLURM_USER, settings.VIGIL_HEALTH = "slurm", PORTAL, "act"
    settings.VIGIL_RUNS = Path(tempfile.mkdtemp(prefix="vigil-runs-"))
    shutil.chown(settings.VIGIL_RUNS, group=People().group)
    settings.VIGIL_RUNS.chmod(0o2710)
    yield
    shutil.rmtree(settings.VIGIL_RUNS, ignore_errors=True)


class SlurmFleet(AgentFleet):
    """The nodes of a private Slurm, with agents."""

    def __init__(self, slurm: Cluster, scheduler: Slurm) -> None:
        super().__init__(tuple(slurm.layout.names), scheduler)
        self.slurm = slurm
        for part in (Reading.Part.NODES, Reading.Part.PARTITIONS):
            sync.read(scheduler, part)

    def drained_nodes(self) -> dict[str, str]:
        """Return the reason of each drained node in Slurm's own words, without who set it."""
        return {name: reason for name, (state, reason) in self.states().items() if "DRAIN" in state}

    def states(self) -> dict[str, tuple[str, str]]:
        """Return state and reason by node, as `scontrol show node` prints them."""
        printed = self.slurm.run("scontrol", "show", "node", "--oneliner")
        found = [_NODE.match(line) for line in printed.splitlines()]
        return {node["name"]: (node["state"], node["reason"] or "") for node in found if node}

    def set_state(self, state: str) -> None:
        """Bring the first node into this state as it happens to a node, and read it.

        Slurm takes 30 s to notice that a slurmd has died. A node that `scontrol` calls down would be back at once: an
        answer to the last ping returns it to service.
        """
        if state == "down":
            self.slurm.kill(self.node)
        elif state == "down+reboot_issued":  # its slurmd runs RebootProgram, which does nothing here
            self.slurm.run("scontrol", "reboot", self.node)
        else:
            self.slurm.run("scontrol", "update", f"NodeName={self.node}", "State=RESUME")
        word = state.rpartition("+")[2]

        def is_read() -> bool:
            sync.read(self.scheduler, Reading.Part.NODES)
            return word in node_states.state_words(Node.objects.get(name=self.node).state)

        until(is_read, at_most_s=1.0)

    def restore(self) -> None:
        """Return every node to service, end Vigil's own jobs, and remove reservations."""
        self.slurm.run("scancel", f"--user={PORTAL}")
        for name in self.names:
            if name not in self.slurm.daemons:
                self.slurm.start(name)
        for line in self.slurm.run("scontrol", "show", "reservation", "--oneliner").splitlines():
            if line.startswith("ReservationName="):
                self.slurm.run("scontrol", "delete", line.split()[0])
        until(self._resume)

    def _resume(self) -> bool:
        """Resume nodes that are out of service; return whether all are idle."""
        for name, (state, _) in self.states().items():
            if any(word in state for word in OUT):
                with suppress(AssertionError):  # it returned by itself
                    self.slurm.run("scontrol", "update", f"NodeName={name}", "State=RESUME")
        return self.slurm.idle() == len(self.names)
