"""What the ranks of our trainer are started with: torchrun's variables and ours."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from training.launch.attempt import Attempt
from training.launch.incarnation import Incarnation
from training.launch.plan import BadPlan, Plan
from training.launch.ranks import inherited

HEAP = {
    "GLIBC_TUNABLES": ":".join(
        (
            f"glibc.malloc.trim_threshold={128 << 20}",
            f"glibc.malloc.mmap_threshold={32 << 20}",
            "glibc.malloc.tcache_count=0",
        )
    )
}
"""For glibc's malloc: what a step has freed stays with the process for the next, which would else fetch every page anew
from the kernel; that took a fifth of the round of a federation on a CPU. And what posix_memalign cuts off in front of a
tensor is joined with it again once both are free: in a thread's cache it stays apart, and the next tensor of the same
size does not fit where the last one was. A federation's memory above torch's grew by a third by that."""


@dataclass(frozen=True)
class RankCommand:
    """What to start as a rank, where, and with which variables besides those that every rank gets."""

    arguments: tuple[str, ...]
    directory: Path
    environment: Mapping[str, str] = field(default_factory=dict)


def trainer(plan: Plan) -> RankCommand:
    """Our own trainer. With -P, so that no file lying about in the working directory is imported."""
    # A checkout that was never installed is found by PYTHONPATH, and so must its ranks be.
    found = {"PYTHONPATH": os.environ["PYTHONPATH"]} if "PYTHONPATH" in os.environ else {}
    if importlib.util.find_spec("torch") is None:
        raise BadPlan(f"The job's Python, {sys.executable}, has no torch. Install it there, or take another Python.")
    arguments = (sys.executable, "-P", "-m", "training", str(plan.run_dir / "portal" / "run.toml"))
    lean = {"PYDANTIC_DISABLE_PLUGINS": "__all__"}  # looking for some reads the metadata of every package installed
    return RankCommand(arguments, plan.job_dir, {**HEAP, **lean, **plan.env, **found})


def rank_environment(
    plan: Plan,
    attempt: Attempt,
    incarnation: Incarnation,
    command: RankCommand,
    *,
    place: int,
    local_rank: int,
    store_file: Path,
) -> dict[str, str]:
    """The whole environment of one rank: inherited by an allow list, torchrun's names, ours."""
    nodes, node = len(incarnation.members), place
    rank, world_size = node * plan.ranks_per_node + local_rank, nodes * plan.ranks_per_node
    return {
        "OMP_NUM_THREADS": str(plan.cpus_per_rank),
        "TORCH_FR_BUFFER_SIZE": "2000",
        **inherited(),
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        **command.environment,
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "GROUP_RANK": str(node),
        "ROLE_RANK": str(rank),
        "ROLE_NAME": "default",
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(plan.ranks_per_node),
        "GROUP_WORLD_SIZE": str(nodes),
        "ROLE_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": incarnation.host,
        "MASTER_PORT": str(incarnation.port),
        "TORCHELASTIC_RUN_ID": f"{attempt.number}.{incarnation.generation}",
        "TORCHELASTIC_RESTART_COUNT": str(incarnation.number),
        "TORCHELASTIC_MAX_RESTARTS": str(plan.in_place),
        # Sharing one store between rendezvous and training made recovery hang (protocols.md §6).
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        # What the run was made to divide over: with fewer ranks it accumulates, or takes uneven shares.
        "VIGIL_FULL_WORLD_SIZE": str(plan.max_nodes * plan.ranks_per_node),
        "VIGIL_RUN_DIR": str(plan.run_dir),
        "VIGIL_ATTEMPT_DIR": str(attempt.folder),
        "VIGIL_NODE": plan.node,
        "VIGIL_RESTART_COUNT": str(plan.restart_count),
        "VIGIL_INCARNATION": str(incarnation.number),
        "VIGIL_GENERATION": str(incarnation.generation),
        "VIGIL_RESUME": incarnation.resume,
        "VIGIL_STORE_FILE": str(store_file),
        "VIGIL_STORE_HOST": incarnation.host,
    }
