"""Signals: what health rules can be about, with the fields of an observation of each.

An *event* happens at a moment and is counted. A *state* holds for a time, and is reported at every reading.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

SubjectKind = Literal["gpu", "node", "rack", "cluster"]


@dataclass(frozen=True, slots=True)
class Signal:
    """One kind of observation. `fields`: names with what they mean, units in the name."""

    name: str
    kind: Literal["event", "state"]
    subject: SubjectKind
    description: str
    fields: Mapping[str, str]
    is_history: bool = False
    """It is about past days, so it lasts for a while although nothing new happens: a repair ends it all the same."""

    @property
    def is_event(self) -> bool:
        return self.kind == "event"


_ALL = (
    Signal(
        "xid", "event", "gpu", "An error that NVIDIA's driver logged about a GPU.",
        {
            "code": "the Xid's number",
            "text": "the rest of the line",
            "is_fatal": "whether its line says so (NVLink)",
            "is_listed": "whether a rule names the code",
            "is_echo": "another Xid of the same GPU within 60 s explains it",
            "is_implied": "the driver said that the GPU is gone without logging an Xid; counted as Xid 79",
            "recovery": "for Xid 154: the action that the driver recommends, such as none, reset or reboot",
            "user": "who had the GPU, to count different people",
            "program": "the name of the job that had the GPU, to count different programs",
        },
    ),
    Signal(
        "sxid", "event", "node", "An error that an NVSwitch logged.",
        {"code": "the SXid's number", "is_fatal": "whether its line says so", "text": "the rest of the line"},
    ),
    Signal(
        "gpu_lost", "state", "gpu", "A GPU of which NVML reports only that it is lost, or that NVML no longer lists.",
        {"is_lost": "whether it is"},
    ),
    Signal(
        "gpu_count", "state", "node", "How many GPUs the node has.",
        {
            "found": "GPUs that the agent lists",
            "missing": "how many fewer than the scheduler expects, not counting those that are known to be lost",
        },
    ),
    Signal(
        "nvml", "state", "node", "NVIDIA's management library.",
        {"silent_s": "for how many seconds it has not responded; 0: it responds"},
    ),
    Signal(
        "gpu_counters", "state", "gpu", "Slow counters and states of a GPU.",
        {
            "ecc_uncorrected": "uncorrectable memory errors since the driver was loaded",
            "ecc_corrected": "corrected memory errors since the driver was loaded",
            "ecc_corrected_to_peers": "the same, divided by the median of its node's other GPUs (at least 1)",
            "sram_threshold_exceeded": "NVIDIA's own criterion to replace the GPU: 1 if it is met",
            "remapped_pending": "memory rows whose remapping waits for a reset",
            "remapped_failed": "1: a row could not be remapped",
            "remapped_uncorrected": "rows that were remapped after uncorrectable errors, ever",
            "recovery_action": "the driver's advice: 0 none, 1 reset, 2 reboot, 3 drain P2P, 4 drain and reset, …",
            "nvlinks_down": "NVLinks that are not active",
            "pcie_width_to_peers": "PCIe lanes in use, divided by the median of its node's other GPUs",
            "pcie_generation_to_peers": "PCIe generation while it works, divided by that of other working GPUs",
            "power_cap_to_peers": "its power limit, divided by the median of its node's other GPUs",
        },
    ),
    Signal(
        "gpu_samples", "state", "gpu", "What a GPU last reported; it is sampled every second.",
        {
            "temperature_c": "temperature",
            "margin_c": "degrees left to its slowdown temperature",
            "throttle": "NVML's reason bits: 0x04 power cap, 0x20 and 0x40 heat, 0x80 power brake",
            "gpu_percent": "utilisation",
            "watts": "power",
        },
    ),
    Signal(
        "host", "state", "node", "What the node's operating system reports.",
        {
            "blocked_processes": "processes in uninterruptible sleep (state D)",
            "clock_offset_s": "seconds by which its clock differs from the portal's, whichever way",
            "root_free_share": "free part of the root file system, 0 to 1",
            "root_free_mib": "free space of the root file system",
            "shm_free_share": "free part of /dev/shm, 0 to 1",
        },
    ),
    Signal(
        "mount", "state", "node", "A shared file system that the agent probes.",
        {
            "is_slow": "it takes longer than 2 s, hangs or fails",
            "slow_s": "for how many seconds it has been slow; 0: it is not",
            "problem": "why it fails; empty while it only hangs or is slow",
            "affected_share": "share of the nodes with this file system on which it is slow, 0 to 1",
        },
    ),
    Signal(
        "port", "state", "node", "An InfiniBand or RoCE port.",
        {
            "is_up": "whether its link is active",
            "usually_up": "whether it is active on most other nodes that have a port of this name",
        },
    ),
    Signal("link_down", "event", "node", "An InfiniBand or RoCE link that went down, even if only for a moment.", {}),
    Signal(
        "agents", "state", "cluster", "All agents together.",
        {
            "agents": "agents that have reported before",
            "silent": "how many of them are silent",
            "silent_share": "their share, 0 to 1",
        },
    ),
    Signal(
        "agent", "state", "node", "The node's agent.",
        {
            "silent_s": "seconds since its last report",
            "silent_share": "share of all agents that are silent, 0 to 1; 0 unless three are",
            "is_down": "whether the scheduler does not reach the node either",
        },
    ),
    Signal(
        "leftover", "state", "node", "Processes of ended jobs on a node's GPUs.",
        {
            "processes": "how many there are while no job runs on the node; 0 while one does",
            "user": "whose they are, if they are one user's",
        },
    ),
    Signal(
        "software", "state", "node",
        "Versions on the node, compared with most nodes of its partition and model of GPU, and with minimums.",
        {
            "driver_differs": "whether its driver is another",
            "kernel_differs": "whether its kernel is another",
            "vbios_differs": "whether a GPU's VBIOS is another",
            "firmware_differs": "whether its InfoROM, InfiniBand adapter firmware or fabric manager is another",
            "below_minimum": "how many of its versions are below a minimum (/inventory)",
            "outdated": "which these are, as text",
        },
    ),
    Signal(
        "repeat_failures", "state", "node", "A node on which jobs fail more often than on the others (/reliability).",
        {
            "is_node": "whether different programs failed there, so that the node is to blame",
            "failures": "failures on the node in 30 days, from the day after its last repair, that no program is to "
            "blame for; those that only a person's jobs claim, or that nothing explains, once per person",
            "expected": "the number expected from the other nodes' rate",
            "programs": "different programs among them",
            "owners": "people whose jobs they were; of deleted jobs, projects",
            "chance": "probability of so many on any of the nodes by chance",
            "programs_chance": "the same, with each program counted once",
        },
        is_history=True,
    ),
    Signal(
        "rack_inlet", "state", "rack", "The temperature of the air that a rack's nodes take in.",
        {
            "inlet_c": "median over its nodes",
            "above_neighbours_c": "how much warmer than the median of up to two racks on either side",
            "is_estimate": "whether it is estimated from GPU temperature and power, not measured by BMCs",
            "nodes": "nodes with a value",
        },
    ),
    Signal(
        "step_time", "state", "node", "A node on which programs take longer steps than the same programs elsewhere.",
        {
            "ratio": "step time to that of the same programs elsewhere, median over programs; 1.2: a fifth slower",
            "programs": "programs that ran there and elsewhere in 7 days",
            "slow_programs": "how many of them are clearly slower there",
            "slow_share": "their share, 0 to 1",
            "owners": "people whose programs these slower ones are",
            "jobs": "jobs on the node that are compared",
            "other_nodes": "nodes that they are compared with",
        },
        is_history=True,
    ),
    Signal(
        "program_failures", "state", "cluster", "A program that fails in the same way wherever it runs.",
        {
            "failures": "failures of one person's programs with the same error in 14 days",
            "nodes": "different nodes that they happened on",
            "share_of_one_node": "share of the failures that ran on the node with most of them, 0 to 1",
            "user": "owner of the newest failed job",
            "program": "number and name of the newest failed job",
        },
    ),
)  # fmt: skip
SIGNALS: Mapping[str, Signal] = {signal.name: signal for signal in _ALL}

_SUBJECTS: Mapping[SubjectKind, str] = {"gpu": "a GPU", "node": "a node", "rack": "a rack", "cluster": "the cluster"}


def markdown_list() -> Iterator[str]:
    """Yield the lines of docs/reference/health-rules.md that list the signals and the fields of each."""
    for signal in _ALL:
        subject = _SUBJECTS[signal.subject]
        yield from _list_item(f"**`{signal.name}`**, {signal.kind} of {subject}. {signal.description}")
        for name, meaning in signal.fields.items():
            yield from _list_item(f"`{name}`: {meaning}", indent="  ")


def _list_item(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(
        text, 120, initial_indent=f"{indent}- ", subsequent_indent=f"{indent}  ", break_on_hyphens=False
    )
