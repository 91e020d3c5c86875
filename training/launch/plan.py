"""What is to be launched here: run.toml and the scheduler's environment as one typed value."""

from __future__ import annotations

import os
import re
import socket
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from training.config.counting import counted

BAD_PLAN = 2  # exit code: nothing was started, and starting again would not help
IDENTIFIER = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@:+-]{0,127}")
CODE_TABLES = {"script": "script", "federated": "client"}
"""By kind of job the table of run.toml that says where somebody's own code comes from."""


class BadPlan(Exception):
    """run.toml or the environment makes no sense; the message says what to do."""


@dataclass(frozen=True, kw_only=True)
class Code:
    """Somebody's own files. They lie in job/code, or come from git as the job starts."""

    table: str  # of run.toml, that asks for it
    git: str = ""
    ref: str = ""


@dataclass(frozen=True, kw_only=True)
class Script:
    """Somebody's own program, as ranks."""

    entry: str
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    python: str = ""


@dataclass(frozen=True, kw_only=True)
class Plan:
    run_dir: Path
    scheduler_id: str
    restart_count: int
    node: str
    node_rank: int = 0
    nodes: int = 1  # allocated: as many launchers are expected
    min_nodes: int = 1
    max_nodes: int = 1
    spares: int = 0  # of the nodes allocated, that stand by until one of the others fails
    ranks_per_node: int = 1
    gpus_per_node: int = 0
    cpus_per_rank: int = 1
    in_place: int = 3  # restarts of ranks; every new commit refills it
    gather_seconds: float = 60.0  # for launchers still missing at the start, once there are min_nodes
    return_seconds: float = 0.0  # for a lost node to come back, where fewer than min_nodes are left
    grow_seconds: float = 60.0  # of an incarnation before it is ended to take in more nodes, at least
    grace_seconds: float = 30.0  # besides twice the last measured write
    max_grace_seconds: float = 900.0  # for both together: the portal kills after that
    drain_seconds: float = 10.0  # for the last reports, while the nodes wait
    sample_seconds: float = 2.0  # between two looks at what the node's processes use
    limits: Mapping[str, float] = field(default_factory=dict)  # the watchdog's, by phase
    code: Code | None = None  # what comes along of somebody's own
    script: Script | None = None  # the ranks are a program of it; None: the ranks are our trainer
    counts: str = "step"  # or round: what the run counts
    env: Mapping[str, str] = field(default_factory=dict)  # for every rank: the job's environment, by run.toml

    @property
    def is_elastic(self) -> bool:
        """Whether it goes on with fewer nodes, and takes in more."""
        return self.max_nodes > self.min_nodes

    @property
    def is_alone(self) -> bool:
        """Whether no other node can ever take part."""
        return self.max_nodes + self.spares == 1

    @property
    def job_dir(self) -> Path:
        return self.run_dir / "job"

    @property
    def code_dir(self) -> Path:
        return self.job_dir / "code"

    @property
    def told(self) -> Path:
        """What batch.sh and the launchers tell each other: `asked`, the signal that came; `code`, the last word."""
        return self.job_dir / "told" / f"{self.scheduler_id}.{self.restart_count}"

    @property
    def checkpoints(self) -> Path:
        return self.job_dir / "checkpoints"

    @property
    def is_first(self) -> bool:
        """Whether this is the allocation's first node, which does what is done once, before any incarnation. Who leads
        these may change."""
        return self.node_rank == 0


def read_plan(run_dir: Path, environment: Mapping[str, str] = os.environ) -> Plan:
    """The plan of one node's launcher, or BadPlan."""
    path = run_dir / "portal" / "run.toml"
    try:
        with open(path, "rb") as file:
            document = tomllib.load(file)
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise BadPlan(f"{path} cannot be read: {error}") from None
    launch = _Table(document.get("launch", {}), "launch")
    watchdog = _Table(launch.table("watchdog"), "launch.watchdog")
    gpus = launch.whole("gpus_per_node", 0, least=0)
    least = launch.whole("nodes", 1, least=1)
    most = launch.whole("max_nodes", least, least=least)
    spares = launch.whole("spares", 0, least=0) if most == least else 0
    # With "min:max" nodes the scheduler decides how many there are.
    nodes = _number(environment, "SLURM_NNODES", 0) or most + spares
    spares = min(spares, nodes - 1)
    used = nodes - spares
    return Plan(
        run_dir=run_dir,
        scheduler_id=_scheduler_id(environment),
        restart_count=_number(environment, "SLURM_RESTART_COUNT", 0),
        node=environment.get("SLURMD_NODENAME") or socket.gethostname(),
        node_rank=_number(environment, "SLURM_NODEID", 0),
        nodes=nodes,
        min_nodes=min(least, nodes) if most > least else used,
        max_nodes=max(most, nodes) if most > least else used,
        spares=spares,
        ranks_per_node=gpus or launch.whole("ranks_per_node", 1, least=1),
        gpus_per_node=gpus,
        cpus_per_rank=launch.whole("cpus_per_rank", 1, least=1),
        in_place=launch.whole("in_place", 3, least=0),
        gather_seconds=launch.seconds("gather_seconds", 60.0),
        # A fixed number has no other nodes to wait for: only for launchers that are started again (training/start.py).
        return_seconds=launch.seconds("return_seconds", 120.0 if most > least else 30.0 if nodes > 1 else 0.0),
        grow_seconds=launch.seconds("grow_seconds", 60.0),
        grace_seconds=launch.seconds("grace_seconds", 30.0),
        max_grace_seconds=launch.seconds("max_grace_seconds", 900.0),
        drain_seconds=launch.seconds("drain_seconds", 10.0),
        sample_seconds=launch.seconds("sample_seconds", 2.0),
        limits={phase: watchdog.seconds(phase, 0) for phase in watchdog.found},
        code=_code(document),
        script=_script(document.get("script")) if document.get("kind") == "script" else None,
        counts=counted(str(document.get("kind"))),
        env=_variables(_Table(document.get("environment", {}), "environment")),
    )


def _scheduler_id(environment: Mapping[str, str]) -> str:
    """The scheduler's, or for a launch by hand one that nobody else has."""
    found = environment.get("VIGIL_SCHEDULER_ID") or environment.get("SLURM_JOB_ID", "")  # of an array: "17_3"
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


def _code(document: Mapping[str, Any]) -> Code | None:
    name = CODE_TABLES.get(str(document.get("kind")))
    if name is None or name not in document:
        return None
    table = _Table(document.get(name), name)
    return Code(table=name, git=table.text("git", ""), ref=table.text("ref", ""))


def _script(found: Any) -> Script:
    table = _Table(found, "script")
    return Script(
        entry=table.text("entry", "train.py"),
        args=tuple(str(argument) for argument in table.found.get("args", ())),
        env=_variables(table),
        python=table.text("python", ""),
    )


def _variables(table: _Table) -> dict[str, str]:
    return {str(name): str(value) for name, value in table.table("env").items()}


class _Table:
    """A TOML table whose values are taken by type, with errors that name the key."""

    def __init__(self, found: Any, name: str) -> None:
        if not isinstance(found, dict):
            raise BadPlan(f"run.toml: [{name}] is missing or not a table")
        self.found, self.name = found, name

    def whole(self, key: str, default: int, *, least: int) -> int:
        value = self.found.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise BadPlan(f"run.toml: {self.name}.{key} must be a whole number of at least {least}, not {value!r}")
        return value

    def seconds(self, key: str, default: float) -> float:
        value = self.found.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e9:
            raise BadPlan(f"run.toml: {self.name}.{key} must be seconds, not {value!r}")
        return float(value)

    def text(self, key: str, default: str) -> str:
        value = self.found.get(key, default)
        if not isinstance(value, str):
            raise BadPlan(f"run.toml: {self.name}.{key} must be text, not {value!r}")
        return value

    def table(self, key: str) -> dict[str, Any]:
        value = self.found.get(key, {})
        if not isinstance(value, dict):
            raise BadPlan(f"run.toml: {self.name}.{key} must be a table")
        return value
