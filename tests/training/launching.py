"""Start launchers in tests and inspect what they leave."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.waiting import until
from training.reporting.spool import read_spool

HERE = Path(__file__).parent
ENDLESS = 100_000  # steps: as long as nobody ends it
KILLS = int(os.environ.get("TEST_KILLS", "1"))  # of each kind, all in one job; test-all and soak take more


def accident(rank: int, step: object, do: str, **more: Any) -> dict[str, Any]:
    """Describe what happens to a fake rank at a step (fake_rank.py)."""
    return {"rank": rank, "step": step, "do": do, **more}


@dataclass
class Run:
    """A run directory, and the launchers started in it. All of them end with the test."""

    path: Path

    def __post_init__(self) -> None:
        self.launchers: list[subprocess.Popen[bytes]] = []
        (self.path / "portal").mkdir(parents=True)
        (self.path / "job").mkdir()

    def describe(self, text: str, *, attempt: int | None = None, resume: str | None = None) -> None:
        (self.path / "portal" / "run.toml").write_text(text)
        if attempt:
            (self.path / "portal" / "attempt.json").write_text(json.dumps({"number": attempt, "resume": resume}))

    def launch(
        self,
        *arguments: str,
        job: str = "100",
        restart: int = 0,
        node: int = 0,
        nodes: int = 1,
        environment: dict[str, str] | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start `training.launch`, or, with arguments, the one with fake ranks."""
        slurm_variables = {
            "SLURM_JOB_ID": job,
            "SLURM_RESTART_COUNT": str(restart),
            "SLURM_NODEID": str(node),
            "SLURM_NNODES": str(nodes),
            "SLURMD_NODENAME": f"dgx0{node + 1}",
        }
        what = [str(HERE / "fake_launch.py"), str(self.path), *arguments] if arguments else None
        with open(self.path / "batch.log", "ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-P", *(what or ["-m", "training.launch", str(self.path)])],
                env={**os.environ, **slurm_variables, **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.launchers.append(process)
        return process

    def fake(self, *, ranks: int = 2, launch: str = "", **options: Any) -> subprocess.Popen[bytes]:
        """Start one launcher with fake ranks. `launch`: further lines of [launch]."""
        self.describe(f'kind = "distributed"\n[launch]\nranks_per_node = {ranks}\nsample_seconds = 0.2\n{launch}')
        return self.launch(json.dumps(options))

    def script(self, source: str, *, ranks: int = 1, launch: str = "", script: str = "") -> subprocess.Popen[bytes]:
        """Start one launcher with a user's script."""
        code = self.path / "job" / "code"
        code.mkdir(exist_ok=True)
        (code / "train.py").write_text(source)
        self.describe(
            f'kind = "script"\n[launch]\nranks_per_node = {ranks}\nsample_seconds = 0.2\n{launch}\n[script]\n{script}'
        )
        return self.launch()

    def attempt(self, number: int = 1) -> Path:
        return self.path / "job" / f"attempt-{number}"

    def result(self, number: int = 1) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.attempt(number) / "result.json").read_text())
        return found

    def events(self, kind: str, number: int = 1) -> list[dict[str, Any]]:
        return [event for event in self._events(number) if event["kind"] == kind]

    def _events(self, number: int) -> list[dict[str, Any]]:
        found = []
        for path in sorted((self.attempt(number) / "spool").glob("*.jsonl")):
            found += [event for batch in read_spool(path)[1] for event in batch.events]
        return sorted(found, key=lambda event: float(event["time"]))

    def losses(self, number: int = 1, rank: int = 0) -> dict[int, dict[int, float]]:
        """Return incarnation → step → loss."""
        return self.series("loss", number, rank)

    def series(self, name: str, number: int = 1, rank: int = 0) -> dict[int, dict[int, float]]:
        """Return incarnation → step → value."""
        found: dict[int, dict[int, float]] = {}
        for path in (self.attempt(number) / "spool").glob(f"*.{rank}.*.jsonl"):
            for batch in read_spool(path)[1]:
                found.setdefault(int(path.name.split(".")[0]), {}).update(batch.series.get(name, []))
        return found

    def log(self) -> str:
        return (self.path / "batch.log").read_text()

    def rank_log(self) -> str:
        """Return the log of rank 0 of the first incarnation so far."""
        path = self.attempt() / "logs" / "0.0.log"
        return path.read_text() if path.exists() else ""

    def started(self, incarnation: int = 0, ranks: int = 2, number: int = 1) -> list[int]:
        """Return the pids of the ranks, once all have met."""
        place = self.attempt(number) / "sync"
        paths = [place / f"{incarnation}.{rank}" for rank in range(ranks)]
        until(lambda: all(path.exists() and "-1 " not in path.read_text() for path in paths))
        return [int(path.read_text().split()[1]) for path in paths]

    def processes(self) -> list[psutil.Process]:
        """Return every live process that has this run directory in its command line or environment."""
        return [process for process in psutil.process_iter() if process.pid != os.getpid() and self._owns(process)]

    def _owns(self, process: psutil.Process) -> bool:
        try:
            if process.status() == psutil.STATUS_ZOMBIE:
                return False
            return str(self.path) in " ".join(process.cmdline()) or self._belongs(process)
        except psutil.Error:
            return False

    def _belongs(self, process: psutil.Process) -> bool:
        return process.environ().get("VIGIL_RUN_DIR") == str(self.path)

    def assert_nothing_left(self, seconds: float = 20.0) -> None:
        until(lambda: not self.processes(), seconds=seconds)

    def end(self) -> None:
        for process in self.launchers:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.communicate()
        for left in self.processes():
            with suppress(psutil.NoSuchProcess):
                left.kill()
