"""Read what to launch on this node, from run.toml and the scheduler's environment, as one typed value."""

from __future__ import annotations

import os
import re
import socket
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from training.config.progress_unit import progress_unit

BAD_PLAN = 2  # exit code: nothing was started, and starting again would not help
IDENTIFIER = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@:+-]{0,127}")
CODE_TABLES = {"script": "script", "federated": "client"}
"""By kind of job, the table of run.toml that names the source of the user's code."""


class BadPlan(Exception):
    """run.toml or the environment is invalid. The message says what to change."""


@dataclass(frozen=True, kw_only=True)
class CodePlan:
    """The user's own files: in job/code, or fetched from git when the job starts."""

    table: str  # of run.toml, for error messages
    git: str = ""
    ref: str = ""


@dataclass(frozen=True, kw_only=True)
class ScriptPlan:
    """The user's own program, run as ranks."""

    entry: str
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    python: str = ""


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    run_dir: Path
    scheduler_id: str
    restart_count: int
    node: str
    node_rank: int = 0
    nodes: int = 1  # allocated, hence launchers expected
    min_nodes: int = 1
    max_nodes: int = 1
    spares: int = 0  # allocated nodes that stand by until another one fails
    ranks_per_node: int = 1
    gpus_per_node: int = 0
    cpus_per_rank: int = 1
    in_place: int = 3  # restarts of the ranks; every new checkpoint refills this budget
    gather_seconds: float = 60.0  # wait for missing launchers at the start, once there are min_nodes
    return_seconds: float = 0.0  # wait for a lost node to return, where fewer than min_nodes are left
    grow_seconds: float = 60.0  # minimum run time of an incarnation before it is ended to take in more nodes
    grace_seconds: float = 30.0  # to stop in, in addition to twice the last measured write
    max_grace_seconds: float = 900.0  # limit for both together: the portal kills after that
    drain_seconds: float = 10.0  # to post the last reports, while the nodes wait
    sample_seconds: float = 2.0  # between two samples of the node's resources
    limits: Mapping[str, float] = field(default_factory=dict)  # of the watchdog, by phase
    code: CodePlan | None = None  # the user's own code, if the job has any
    script: ScriptPlan | None = None  # run as ranks; None: the ranks are our trainer
    unit: str = "step"  # or "round": the unit of progress
    env: Mapping[str, str] = field(default_factory=dict)  # the job's environment from run.toml, for every rank

    @property
    def is_elastic(self) -> bool:
        """Whether the run continues with fewer nodes and takes in more."""
        return self.max_nodes > self.min_nodes

    @property
    def is_single_node(self) -> bool:
        """Whether no other node can ever take part."""
        return self.max_nodes + self.spares == 1

    @property
    def job_dir(self) -> Path:
        return self.run_dir / "job"

    @property
    def code_dir(self) -> Path:
        return self.job_dir / "code"

    @property
    def exchange_dir(self) -> Path:
        """Return the folder for files between batch.sh and the launchers.

        `asked` has the signal that was received, `code` the exit code.
        """
        return self.job_dir / "told" / f"{self.scheduler_id}.{self.restart_count}"

    @property
    def checkpoints(self) -> Path:
        return self.job_dir / "checkpoints"

    @property
    def is_first(self) -> bool:
        """Whether this is the allocation's first node, which does the one-time work before any incarnation.

        The leader of an incarnation may be another node.
        """
        return self.node_rank == 0


def read_plan(run_dir: Path, environment: Mapping[str, str] = os.environ) -> LaunchPlan:
    """Return the plan of this node's launcher. Raises BadPlan."""
    path = run_dir / "portal" / "run.toml"
    try:
        with open(path, "rb") as file:
            document = tomllib.load(file)
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise BadPlan(f"{path} cannot be read: {error}") from None
    launch = _TomlTable(document.get("launch", {}), "launch")
    watchdog = _TomlTable(launch.table("watchdog"), "launch.watchdog")
    gpus = launch.integer("gpus_per_node", 0, minimum=0)
    minimum = launch.integer("nodes", 1, minimum=1)
    maximum = launch.integer("max_nodes", minimum, minimum=minimum)
    spares = launch.integer("spares", 0, minimum=0) if maximum == minimum else 0
    # For a "min:max" number of nodes the scheduler decides how many are allocated.
    nodes = _number(environment, "SLURM_NNODES", 0) or maximum + spares
    spares = min(spares, nodes - 1)
    running = nodes - spares
    return LaunchPlan(
        run_dir=run_dir,
        scheduler_id=_scheduler_id(environment),
        restart_count=_number(environment, "SLURM_RESTART_COUNT", 0),
        node=environment.get("SLURMD_NODENAME") or socket.gethostname(),
        node_rank=_number(environment, "SLURM_NODEID", 0),
        nodes=nodes,
        min_nodes=min(minimum, nodes) if maximum > minimum else running,
        max_nodes=max(maximum, nodes) if maximum > minimum else running,
        spares=spares,
        ranks_per_node=gpus or launch.integer("ranks_per_node", 1, minimum=1),
        gpus_per_node=gpus,
        cpus_per_rank=launch.integer("cpus_per_rank", 1, minimum=1),
        in_place=launch.integer("in_place", 3, minimum=0),
        gather_seconds=launch.seconds("gather_seconds", 60.0),
        # With a fixed number of nodes, only launchers that training/start.py restarts can come back.
        return_seconds=launch.seconds("return_seconds", 120.0 if maximum > minimum else 30.0 if nodes > 1 else 0.0),
        grow_seconds=launch.seconds("grow_seconds", 60.0),
        grace_seconds=launch.seconds("grace_seconds", 30.0),
        max_grace_seconds=launch.seconds("max_grace_seconds", 900.0),
        drain_seconds=launch.seconds("drain_seconds", 10.0),
        sample_seconds=launch.seconds("sample_seconds", 2.0),
        limits={phase: watchdog.seconds(phase, 0) for phase in watchdog.values},
        code=_code(document),
        script=_script(document.get("script")) if document.get("kind") == "script" else None,
        unit=progress_unit(str(document.get("kind"))),
        env=_variables(_TomlTable(document.get("environment", {}), "environment")),
    )


def _scheduler_id(environment: Mapping[str, str]) -> str:
    """Return the scheduler's job id, or a unique id for a manual launch."""
    found = environment.get("VIGIL_SCHEDULER_ID") or environment.get("SLURM_JOB_ID", "")  # of an array task: "17_3"
    if not found:
        return f"by-hand-{os.getpid()}-{os.urandom(4).hex()}"
    if not IDENTIFIER.fullmatch(found):
        raise BadPlan(f"SLURM_JOB_ID={found!r} is not an id of a scheduler's job")
    return found


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name) or str(default)
    if not text.isdecimal():
        raise BadPlan(f"{name}={text!r} is not a number")
    return int(text)


def _code(document: Mapping[str, Any]) -> CodePlan | None:
    name = CODE_TABLES.get(str(document.get("kind")))
    if name is None or name not in document:
        return None
    table = _TomlTable(document.get(name), name)
    return CodePlan(table=name, git=table.text("git", ""), ref=table.text("ref", ""))


def _script(found: Any) -> ScriptPlan:
    table = _TomlTable(found, "script")
    return ScriptPlan(
        entry=table.text("entry", "train.py"),
        args=tuple(str(argument) for argument in table.values.get("args", ())),
        env=_variables(table),
        python=table.text("python", ""),
    )


def _variables(table: _TomlTable) -> dict[str, str]:
    return {str(name): str(value) for name, value in table.table("env").items()}


class _TomlTable:
    """A TOML table that checks the types of its values and names the key in errors."""

    def __init__(self, found: Any, name: str) -> None:
        if not isinstance(found, dict):
            raise BadPlan(f"run.toml: [{name}] is missing or not a table")
        self.values, self.name = found, name

    def integer(self, key: str, default: int, *, minimum: int) -> int:
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise BadPlan(f"run.toml: {self.name}.{key} must be a whole number of at least {minimum}, not {value!r}")
        return value

    def seconds(self, key: str, default: float) -> float:
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e9:
            raise BadPlan(f"run.toml: {self.name}.{key} must be seconds, not {value!r}")
        return float(value)

    def text(self, key: str, default: str) -> str:
        value = self.values.get(key, default)
        if not isinstance(value, str):
            raise BadPlan(f"run.toml: {self.name}.{key} must be text, not {value!r}")
        return value

    def table(self, key: str) -> dict[str, Any]:
        value = self.values.get(key, {})
        if not isinstance(value, dict):
            raise BadPlan(f"run.toml: {self.name}.{key} must be a table")
        return value
