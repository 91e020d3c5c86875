"""Real ranks for tests: forked from a process that has imported torch already, so that one starts in milliseconds."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import tomlkit

from tests.waiting import until
from training.attempt.lineage import raise_generation
from training.manifest import Manifest, committed

SECONDS = 120.0

_context = multiprocessing.get_context("forkserver")
# torch._dynamo takes longer than torch itself, and every rank's first optimizer asks for it.
_context.set_forkserver_preload(
    ["training.trainer", "training.checkpoint.storage", "training.models.llama", "torch.distributed.fsdp"]
    + ["torch._dynamo", "torch.distributed.optim", "training.parallel._partitioned_adamw", "training.parallel._stages"]
)

TINY: dict[str, Any] = {
    "recipe": "language",
    "steps": 12,
    "global_batch": 12,
    "learning_rate": 1e-2,
    "warmup_steps": 2,
    "validate_every": 0,
    "checkpoint_every": 4,
    "flush_steps": 1,
    "language": {"layers": 2, "heads": 2, "head_width": 8, "context": 16, "dropout": 0.2},
}
"""A run of a second, with dropout, so that random numbers count."""


@dataclass(frozen=True)
class Sabotage:
    """A fault injected into a rank at the n-th call of `target` ("module:name" or "module:Class.name")."""

    target: str
    call: int = 1
    rank: int = 0
    until: str = ""
    """First it waits until this path exists."""
    act: str = "kill"
    """Then: kill, fail (no space on the device), or go on."""


@dataclass
class Incarnation:
    """The ranks of one incarnation, running or ended."""

    attempt_dir: Path
    processes: list[BaseProcess]
    generation: int

    def wait(self, seconds: float = SECONDS) -> list[int | None]:
        """Return exit codes by rank, -n for a signal."""
        deadline = time.monotonic() + seconds
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        codes = [process.exitcode for process in self.processes]
        self.kill()
        assert None not in codes, f"still running after {seconds} s: {codes}\n{self.output()}"
        return codes

    def kill(self, number: int = signal.SIGKILL, *, rank: int | None = None) -> None:
        for index, process in enumerate(self.processes):
            if process.is_alive() and process.pid is not None and rank in (None, index):
                os.kill(process.pid, number)

    def output(self) -> str:
        return "\n".join(path.read_text(errors="replace") for path in sorted(self.attempt_dir.glob("logs/*.log")))


@dataclass
class Run:
    """A run directory as the portal and the launcher would make it."""

    folder: Path
    config: dict[str, Any] = field(default_factory=lambda: dict(TINY))
    attempts: int = 0
    launch: dict[str, Any] = field(default_factory=dict)
    """More of the table [launch] in run.toml."""
    added: Path | None = None
    """A folder with recipes/ and parallel/ of one's own."""
    spy: str = ""
    """module:function, called in every rank before it begins."""
    kind: str = "distributed"

    def __post_init__(self) -> None:
        (self.folder / "portal").mkdir(parents=True)
        (self.folder / "job").mkdir()
        self.write()

    def write(self, **changes: Any) -> None:
        self.config.update(changes)
        document = {
            "name": "test",
            "kind": self.kind,
            "launch": {"gpus_per_node": 0, **self.launch},
            "run": self.config,
        }
        (self.folder / "portal" / "run.toml").write_text(tomlkit.dumps(document))

    @property
    def job_dir(self) -> Path:
        return self.folder / "job"

    @property
    def checkpoints(self) -> list[Manifest]:
        return committed(self.job_dir / "checkpoints")

    def start(
        self, world: int, *, resume: str = "", sabotage: Sabotage | None = None, patient: bool = True
    ) -> Incarnation:
        """Start a new attempt of so many ranks. Patient ones finish each save before the next step: none is skipped."""
        attempt_dir, generation = self.attempt(resume)
        shared = {
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(world),
            "OMP_NUM_THREADS": "1",
            "VIGIL_RUN_DIR": str(self.folder),
            "VIGIL_ATTEMPT_DIR": str(attempt_dir),
            "VIGIL_INCARNATION": "0",
            "VIGIL_GENERATION": str(generation),
            "VIGIL_RESUME": resume,
            "VIGIL_STORE_FILE": str(attempt_dir / "members" / "store-0.json"),
            "VIGIL_CACHE": os.environ["VIGIL_CACHE"],
            "ADDED": str(self.added or ""),
            "SPY": self.spy,
        }
        processes = []
        for rank in range(world):
            environment = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            rank_sabotage = sabotage if sabotage and sabotage.rank == rank else None
            log = attempt_dir / "logs" / f"0.{rank}.log"
            arguments = (environment, [str(self.folder / "portal" / "run.toml")], log, rank_sabotage, patient)
            processes.append(_context.Process(target=_rank, args=arguments, daemon=True))
        for process in processes:
            process.start()
        return Incarnation(attempt_dir, processes, generation)

    def attempt(self, resume: str = "") -> tuple[Path, int]:
        """Create a new attempt and return its folder and generation."""
        self.attempts += 1
        attempt_dir = self.job_dir / f"attempt-{self.attempts}"
        for part in ("spool", "logs", "stacks", "heartbeat", "members"):
            (attempt_dir / part).mkdir(parents=True)
        return attempt_dir, raise_generation(self.job_dir, previous=None, resume=resume)

    def finish(self, world: int, *, resume: str = "") -> Incarnation:
        """Run a whole attempt that must succeed."""
        incarnation = self.start(world, resume=resume)
        codes = incarnation.wait()
        assert codes == [0] * world, incarnation.output()
        return incarnation

    def series(self, name: str = "loss", rank: int = 0) -> dict[int, float]:
        """Return the line of record: per step the value of the newest attempt, and of its newest incarnation."""
        found: dict[int, float] = {}
        for attempt in range(1, self.attempts + 1):
            for batch in self._batches(attempt, rank):
                found.update({step: float(value) for step, value in batch.get("series", {}).get(name, [])})
        return dict(sorted(found.items()))

    def events(
        self, kind: str, *, attempt: int | None = None, incarnation: int = 0, rank: int = 0
    ) -> list[dict[str, Any]]:
        batches = self._batches(attempt or self.attempts, rank, str(incarnation))
        return [event for batch in batches for event in batch.get("events", []) if event["kind"] == kind]

    def _batches(self, attempt: int, rank: int, incarnation: str = "*") -> list[dict[str, Any]]:
        batches = []
        spool = self.job_dir / f"attempt-{attempt}" / "spool"
        for path in sorted(spool.glob(f"{incarnation}.{rank}.*")):
            for line in path.read_text().splitlines():
                try:
                    batches.append(json.loads(line))
                except ValueError:
                    continue  # torn by a kill
        return batches


def fork(act: Callable[..., Any], *arguments: Any) -> BaseProcess:
    """Run a function in a separate process with torch already imported."""
    process = _context.Process(target=act, args=arguments, daemon=True)
    process.start()
    return process


def _rank(
    environment: Mapping[str, str], arguments: list[str], log: Path, sabotage: Sabotage | None, patient: bool
) -> None:
    """Do in the new process what `python -m training …` would do in this environment."""
    os.environ.update(environment)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    import torch

    torch.set_num_threads(1)
    if environment["ADDED"]:
        add_choices(Path(environment["ADDED"]))
    if patient:
        end_saves_between_steps()
    if sabotage is not None:
        _prepare(sabotage)
    if environment["SPY"]:
        module, _, name = environment["SPY"].partition(":")
        getattr(importlib.import_module(module), name)()
    from training.__main__ import main

    sys.exit(main(arguments))


def add_choices(folder: Path) -> None:
    """List and import the modules of this folder's recipes/ and parallel/ like the built-in ones."""
    for kind in ("recipes", "parallel"):
        importlib.import_module(f"training.{kind}").__path__.append(str(folder / kind))


def end_saves_between_steps() -> None:
    from training.runtime.distributed import StepFlags
    from training.trainer import Trainer

    run_step = Trainer._run_step

    def patient_step(trainer: Trainer) -> StepFlags:
        trainer.checkpoints.finish_save()
        return run_step(trainer)

    Trainer._run_step = patient_step  # type: ignore[method-assign]


def _prepare(sabotage: Sabotage) -> None:
    module, _, path = sabotage.target.partition(":")
    *owners, name = path.split(".")
    owner: Any = importlib.import_module(module)
    for part in owners:
        owner = getattr(owner, part)
    original = getattr(owner, name)
    calls = 0

    def sabotaged(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == sabotage.call and sabotage.until:
            until(lambda: os.path.exists(sabotage.until))
        if calls == sabotage.call and sabotage.act == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if calls == sabotage.call and sabotage.act == "fail":
            raise OSError(28, "No space left on device")
        return original(*arguments, **options)

    setattr(owner, name, sabotaged)
