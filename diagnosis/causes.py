"""What a failure may come of: one code a cause, who must act, and what to do. Codes are stored, counted, exported."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Owner = Literal["researcher", "sysadmin", "both", "nobody"]

UNKNOWN, NONE = "unknown", "none"


@dataclass(frozen=True, slots=True)
class Cause:
    """One code: what happened in a few words, who must act, and what they should do first."""

    code: str
    title: str
    owner: Owner
    advice: str

    @property
    def heading(self) -> str:
        """What happened, as a sentence begins with it."""
        return self.title[:1].upper() + self.title[1:]

    @property
    def is_hardware(self) -> bool:
        """Return whether it is a failure of a machine, which only that machine's own evidence confirms."""
        return self.domain == "gpu" or self.code in {"numerics.corruption", "scheduler.node_fail"}

    @property
    def domain(self) -> str:
        return self.code.partition(".")[0]


_ALL = (
    Cause(
        "gpu.ecc",
        "a GPU's memory failed",
        "sysadmin",
        "Drain the node and reset the GPU; replace it where no more rows can be remapped. The run resumes elsewhere.",
    ),
    Cause(
        "gpu.off_bus",
        "a GPU was lost from the bus",
        "sysadmin",
        "Drain the node at once and power-cycle it; reseat or replace the GPU if it happens again.",
    ),
    Cause(
        "gpu.firmware",
        "a GPU's firmware or driver hung",
        "sysadmin",
        "Reset the GPU or reboot the node; compare the driver's release notes if it comes back.",
    ),
    Cause(
        "gpu.nvlink",
        "NVLink or an NVSwitch failed",
        "sysadmin",
        "Drain the node, check the link that is named and the fabric manager, reset GPUs and switches together.",
    ),
    Cause(
        "gpu.thermal",
        "a GPU was too hot or had too little power",
        "sysadmin",
        "Check the node's fans, inlet air and power supplies before it takes jobs again.",
    ),
    Cause(
        "network.fabric",
        "the network between the ranks failed",
        "sysadmin",
        "Check the port, cable and switch between the two nodes that are named; then resume.",
    ),
    Cause(
        "collective.timeout",
        "a collective operation hung until its time-out",
        "researcher",
        "Look at the rank that was behind: its stack says what it did instead. Often it reads data or saves alone.",
    ),
    Cause(
        "collective.mismatch",
        "ranks called different collective operations",
        "researcher",
        "Make every rank take the same branch: conditions on rank, uneven batches and unused parameters are usual.",
    ),
    Cause(
        "rendezvous.failed",
        "the ranks never met",
        "researcher",
        "Check MASTER_ADDR, MASTER_PORT and the number of processes; choose a free port, or let the launcher choose.",
    ),
    Cause(
        "memory.gpu_oom",
        "a GPU's memory was too small",
        "researcher",
        "Use a smaller micro-batch with more accumulation, recompute activations, or shard more.",
    ),
    Cause(
        "memory.host_oom",
        "the host's memory was too small",
        "researcher",
        "Ask for more memory a node, or use fewer loader workers and smaller buffers.",
    ),
    Cause(
        "memory.shm",
        "shared memory was full",
        "researcher",
        "Give /dev/shm more room (--shm-size in a container), or use fewer loader workers.",
    ),
    Cause(
        "storage.full",
        "a disk or a quota was full",
        "sysadmin",
        "Make room or raise the quota on the file system that is named; then resume.",
    ),
    Cause(
        "storage.io",
        "a file system failed",
        "sysadmin",
        "Check the file system's servers and the node's mount; other jobs there have probably failed, too.",
    ),
    Cause(
        "storage.permission",
        "access to a path was denied",
        "researcher",
        "Ask for the right to the path that is named, or write somewhere else.",
    ),
    Cause(
        "checkpoint.corrupt",
        "a checkpoint can't be read",
        "researcher",
        "Resume from the checkpoint before it.",
    ),
    Cause(
        "checkpoint.mismatch",
        "a checkpoint is of another model or layout",
        "researcher",
        "Build the model that the checkpoint is of, or convert it; the names or shapes that differ are listed.",
    ),
    Cause(
        "numerics.nan",
        "the loss or the gradient was not a number",
        "researcher",
        "Look at the samples of that step, the learning rate and the precision; go on from the checkpoint before.",
    ),
    Cause(
        "numerics.divergence",
        "the loss ran away",
        "researcher",
        "Go back well before the rise with a lower learning rate or stricter clipping.",
    ),
    Cause(
        "numerics.corruption",
        "hardware computed something wrong",
        "sysadmin",
        "Take the node or GPU that is named out and burn it in; resume from before the last clean check.",
    ),
    Cause(
        "program.exception",
        "the program raised an exception",
        "researcher",
        "Read the traceback from its innermost frame of your own code.",
    ),
    Cause(
        "program.config",
        "the program was given something that can't be",
        "researcher",
        "Correct the argument or setting that is named; a dry run finds most of these before the queue does.",
    ),
    Cause(
        "program.device_assert",
        "an assertion failed on the GPU",
        "researcher",
        "Usually an index is out of range: check labels and token ids, or run once on the CPU for the real place.",
    ),
    Cause(
        "program.illegal_access",
        "a GPU kernel accessed memory that is not its own",
        "researcher",
        "Find the kernel with CUDA_LAUNCH_BLOCKING=1 or compute-sanitizer; suspect the GPU only if it repeats it.",
    ),
    Cause(
        "data.missing",
        "data or a model could not be found",
        "researcher",
        "Check the path, or the name and your access at the hub; fetch it before the job where nodes have no network.",
    ),
    Cause(
        "data.corrupt",
        "data could not be decoded",
        "researcher",
        "Find the file that is named, fetch it anew, and let the loader check digests.",
    ),
    Cause(
        "environment.driver",
        "driver, CUDA and libraries don't fit together",
        "sysadmin",
        "Compare the driver of the node with what the program was built for; nvidia-smi and torch.version.cuda say it.",
    ),
    Cause(
        "environment.package",
        "a package is missing or of the wrong version",
        "researcher",
        "Install what is named in the environment that the job uses, and pin it.",
    ),
    Cause(
        "federated.quorum",
        "too few clients of a federation answered",
        "researcher",
        "Look at the clients that dropped out: each is named with its error. Ask more of them, or lower the quorum.",
    ),
    Cause(
        "federated.coverage",
        "too little of a federation's data ever counted",
        "researcher",
        "Give the clients that never counted more time, or use late updates; then resume it with more rounds.",
    ),
    Cause(
        "federated.clients",
        "all clients of a federation failed",
        "researcher",
        "Read the first client's traceback: what all of them run into is the algorithm's, the recipe's or the data's.",
    ),
    Cause(
        "scheduler.time_limit",
        "it reached its time limit",
        "researcher",
        "Resume it; ask for more time or save more often.",
    ),
    Cause(
        "scheduler.preempted",
        "its nodes were taken for more urgent work",
        "nobody",
        "Nothing: it goes on when nodes are free.",
    ),
    Cause(
        "scheduler.node_fail",
        "the scheduler lost a node",
        "sysadmin",
        "Find out why the node stopped answering before it takes jobs again.",
    ),
    Cause(
        "scheduler.cancelled",
        "somebody cancelled it",
        "nobody",
        "Nothing, unless it was not meant.",
    ),
    Cause(
        "scheduler.launch",
        "the scheduler could not start it",
        "sysadmin",
        "Look into slurmd's log on the node that is named: prolog, credentials, mounts.",
    ),
    Cause(
        UNKNOWN,
        "it failed, and nothing says why",
        "both",
        "Look at what is said to be missing below: a kernel log, the scheduler's record, other ranks' logs.",
    ),
    Cause(NONE, "nothing failed", "nobody", "Nothing."),
)

CAUSES = {cause.code: cause for cause in _ALL}


def unconfirmed(advice: str) -> str:
    """Return advice on broken hardware that the machine's own evidence does not confirm: verify first, then act."""
    return (
        "No evidence from the machine itself confirms this. Before anybody drains a node, have a sysadmin look at its "
        f"kernel log and its agent. If they agree: {advice[:1].lower()}{advice[1:]}"
    )
