"""Build the command and the environment of our trainer's ranks: torchrun's variables and ours."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from training.launch.attempt import Attempt
from training.launch.incarnation import Incarnation
from training.launch.plan import BadPlan, LaunchPlan
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
"""Settings of glibc's malloc. Memory that a step frees stays with the process for the next step; otherwise the kernel
would hand out every page again, which took a fifth of a federated round on a CPU. Without the thread cache, the piece
that posix_memalign cuts off in front of a tensor is merged with it once both are free; in the cache it stays apart and
the next tensor of that size no longer fits there, which grew a federation's memory above torch's by a third."""


@dataclass(frozen=True)
class RankCommand:
    """The command of a rank, its working directory, and variables beyond those that every rank gets."""

    arguments: tuple[str, ...]
    directory: Path
    environment: Mapping[str, str] = field(default_factory=dict)


def trainer(plan: LaunchPlan) -> RankCommand:
    """Return the command of our own trainer. With -P, so that no file in the working directory shadows a module.

    Raises BadPlan where the job's Python has no torch.
    """
    # A checkout that was never installed is found through PYTHONPATH: its ranks need it too.
    python_path = {"PYTHONPATH": os.environ["PYTHONPATH"]} if "PYTHONPATH" in os.environ else {}
    if importlib.util.find_spec("torch") is None:
        raise BadPlan(f"The job's Python, {sys.executable}, has no torch. Install it there, or take another Python.")
    arguments = (sys.executable, "-P", "-m", "training", str(plan.run_dir / "portal" / "run.toml"))
    pydantic = {
        "PYDANTIC_DISABLE_PLUGINS": "__all__"
    }  # searching for plugins reads the metadata of every installed package
    return RankCommand(arguments, plan.job_dir, {**HEAP, **pydantic, **plan.env, **python_path})


def rank_environment(
    plan: LaunchPlan,
    attempt: Attempt,
    incarnation: Incarnation,
    command: RankCommand,
    *,
    node_index: int,
    local_rank: int,
    store_file: Path,
) -> dict[str, str]:
    """Return the complete environment of one rank: inherited variables on an allow list, torchrun's, ours."""
    nodes, node = len(incarnation.members), node_index
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
        # The world size that the run was configured for: with fewer ranks it accumulates or takes uneven shares.
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
