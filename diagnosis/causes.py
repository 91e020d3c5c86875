"""List the causes of failures: a code each, who must act, and what to do. Codes are stored, counted and exported."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Owner = Literal["researcher", "sysadmin", "both", "nobody"]

UNKNOWN, NONE = "unknown", "none"


@dataclass(frozen=True, slots=True)
class Cause:
    """A cause of failures: what happened in a few words, who must act, and what they should do first.

    `title` starts in lower case, so that it fits into a sentence: "GPU fell off the bus", "out of GPU memory".
    """

    code: str
    title: str
    owner: Owner
    advice: str

    @property
    def heading(self) -> str:
        """Return the title with a capital letter, as the start of a sentence."""
        return self.title[:1].upper() + self.title[1:]

    @property
    def is_hardware(self) -> bool:
        """Return whether a machine failed, which only evidence from that machine confirms."""
        return self.domain == "gpu" or self.code in {"numerics.corruption", "scheduler.node_fail"}

    @property
    def domain(self) -> str:
        return self.code.partition(".")[0]


_ALL = (
    Cause(
        "gpu.ecc",
        "GPU memory error (ECC)",
        "sysadmin",
        "Drain the node and reset the GPU. Replace it if no more rows can be remapped. The run resumes on other nodes.",
    ),
    Cause(
        "gpu.off_bus",
        "GPU fell off the bus",
        "sysadmin",
        "Drain the node immediately and power-cycle it. Reseat or replace the GPU if it happens again.",
    ),
    Cause(
        "gpu.firmware",
        "GPU firmware or driver hung",
        "sysadmin",
        "Reset the GPU or reboot the node. If it happens again, check the driver's release notes.",
    ),
    Cause(
        "gpu.nvlink",
        "NVLink or NVSwitch error",
        "sysadmin",
        "Drain the node, check the link that is named and the fabric manager, then reset GPUs and switches together.",
    ),
    Cause(
        "gpu.thermal",
        "GPU overheated or underpowered",
        "sysadmin",
        "Check the node's fans, inlet air and power supplies before it runs jobs again.",
    ),
    Cause(
        "network.fabric",
        "network failure between ranks",
        "sysadmin",
        "Check the port, cable and switch between the two nodes that are named, then resume.",
    ),
    Cause(
        "collective.timeout",
        "collective operation timed out",
        "researcher",
        "Look at the stack of the rank that was behind: it shows what it did instead, often reading data or saving.",
    ),
    Cause(
        "collective.mismatch",
        "ranks called different collective operations",
        "researcher",
        "Make all ranks take the same branch. Usually: conditions on the rank, uneven batches, unused parameters.",
    ),
    Cause(
        "rendezvous.failed",
        "rendezvous failed: not all ranks connected",
        "researcher",
        "Check MASTER_ADDR, MASTER_PORT and the number of processes. Choose a free port, or let the launcher do it.",
    ),
    Cause(
        "memory.gpu_oom",
        "out of GPU memory",
        "researcher",
        "Use a smaller micro-batch with more gradient accumulation, recompute activations, or shard the model further.",
    ),
    Cause(
        "memory.host_oom",
        "out of host memory",
        "researcher",
        "Request more memory per node, or use fewer loader workers and smaller buffers.",
    ),
    Cause(
        "memory.shm",
        "out of shared memory (/dev/shm)",
        "researcher",
        "Enlarge /dev/shm (--shm-size in a container), or use fewer loader workers.",
    ),
    Cause(
        "storage.full",
        "disk or quota full",
        "sysadmin",
        "Free space or raise the quota on the file system that is named, then resume.",
    ),
    Cause(
        "storage.io",
        "file system error",
        "sysadmin",
        "Check the file system's servers and the node's mount. Other jobs on it have probably failed too.",
    ),
    Cause(
        "storage.permission",
        "permission denied",
        "researcher",
        "Ask for access to the path that is named, or write somewhere else.",
    ),
    Cause(
        "checkpoint.corrupt",
        "corrupt checkpoint",
        "researcher",
        "Resume from the previous checkpoint.",
    ),
    Cause(
        "checkpoint.mismatch",
        "checkpoint does not match the model or layout",
        "researcher",
        "Build the model that was saved, or convert the checkpoint. The log lists the names or shapes that differ.",
    ),
    Cause(
        "numerics.nan",
        "loss or gradient became NaN",
        "researcher",
        "Check that step's samples, the learning rate and the precision, then resume from the previous checkpoint.",
    ),
    Cause(
        "numerics.divergence",
        "loss diverged",
        "researcher",
        "Go back to a checkpoint well before the rise, with a lower learning rate or stricter clipping.",
    ),
    Cause(
        "numerics.corruption",
        "silent data corruption",
        "sysadmin",
        "Take the node or GPU that is named out of service and burn it in. Resume from before the last clean check.",
    ),
    Cause(
        "program.exception",
        "unhandled exception",
        "researcher",
        "Read the traceback from the innermost frame of your own code.",
    ),
    Cause(
        "program.config",
        "invalid argument or setting",
        "researcher",
        "Correct the argument or setting that is named. A dry run finds most of these before the job is queued.",
    ),
    Cause(
        "program.device_assert",
        "device-side assertion failed",
        "researcher",
        "Usually an index is out of range: check labels and token ids, or run once on the CPU to find the exact line.",
    ),
    Cause(
        "program.illegal_access",
        "illegal memory access in a GPU kernel",
        "researcher",
        "Find the kernel with CUDA_LAUNCH_BLOCKING=1 or compute-sanitizer. Suspect the GPU only if errors follow it.",
    ),
    Cause(
        "data.missing",
        "data or model not found",
        "researcher",
        "Check the path, or the name and your access on the hub. Download it before the job if nodes have no network.",
    ),
    Cause(
        "data.corrupt",
        "corrupt data",
        "researcher",
        "Find the file that is named, download it again, and let the loader check digests.",
    ),
    Cause(
        "environment.driver",
        "incompatible driver, CUDA or libraries",
        "sysadmin",
        "Compare the node's driver with the CUDA version of the program: see nvidia-smi and torch.version.cuda.",
    ),
    Cause(
        "environment.package",
        "missing or incompatible package",
        "researcher",
        "Install the package that is named in the job's environment, and pin its version.",
    ),
    Cause(
        "federated.quorum",
        "too few clients responded",
        "researcher",
        "Check the clients that dropped out: each is listed with its error. Select more clients, or lower the quorum.",
    ),
    Cause(
        "federated.coverage",
        "too little of the federation's data contributed",
        "researcher",
        "Give the clients that never contributed more time, or accept late updates. Then resume with more rounds.",
    ),
    Cause(
        "federated.clients",
        "all clients failed",
        "researcher",
        "Read the first client's traceback. If all clients fail, the fault is usually in the algorithm, the recipe or "
        "the data.",
    ),
    Cause(
        "scheduler.time_limit",
        "time limit reached",
        "researcher",
        "Resume it. Request more time, or save checkpoints more often.",
    ),
    Cause(
        "scheduler.preempted",
        "preempted by a job of higher priority",
        "nobody",
        "No action needed: it resumes when nodes are free.",
    ),
    Cause(
        "scheduler.node_fail",
        "node failure",
        "sysadmin",
        "Find out why the node stopped responding before it runs jobs again.",
    ),
    Cause(
        "scheduler.cancelled",
        "cancelled",
        "nobody",
        "No action needed, unless it was a mistake.",
    ),
    Cause(
        "scheduler.launch",
        "scheduler could not start the job",
        "sysadmin",
        "Check slurmd's log on the node that is named: prolog, credentials, mounts.",
    ),
    Cause(
        UNKNOWN,
        "failed for an unknown reason",
        "both",
        "Open the post-mortem. Under “Not examined” it lists what Vigil could not read: get the kernel log, the "
        "accounting record or the other ranks' logs, and the verdict is revised.",
    ),
    Cause(
        NONE,
        "nothing failed",
        "nobody",
        "No action needed.",
    ),
)

CAUSES = {cause.code: cause for cause in _ALL}


def unconfirmed(advice: str) -> str:
    """Return advice for broken hardware that no evidence from the machine confirms: verify first, then act."""
    return (
        "No evidence from the machine itself confirms this. Before draining the node, ask a sysadmin to check its "
        f"kernel log and its agent. If they confirm it: {advice[:1].lower()}{advice[1:]}"
    )
