"""Two real ranks that take steps and save meanwhile, beside torch's own `dcp.save` and beside nothing: for benches.

The ranks take steps of their own (matrix products and one small reduction) and hold the same tensors, as under DDP.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.multiprocessing.spawn import spawn

from training.checkpoint.cadence import Cadence, Mtbf
from training.checkpoint.pruning import Retention
from training.checkpoint.saving import Checkpoints
from training.checkpoint.writing import ManifestFields, SaveOptions
from training.reporting.reporter import NullReporter
from training.runtime import distributed

SIZE_MIB = 400
RANKS = 2
TENSORS = 48
HOUR = 3600.0
QUIET_STEPS = 40


def measure(*, size: int, pairs: int, window: float, dcp: bool = True) -> dict[str, Any]:
    """Return what rank 0 measured in so many A/B pairs: steps alone, `dcp.save`, and as many steps with our save.

    `window`: seconds of steps, in which a save must be over.
    """
    folder = Path(tempfile.mkdtemp(prefix="vigil-saving-"))
    try:
        spawn(_rank, (folder, size, pairs, window, dcp), nprocs=RANKS)  # type: ignore[no-untyped-call]
        found: dict[str, Any] = json.loads((folder / "found.json").read_text())
        return found
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class SavedWork:
    """The steps of a small model: they keep the processor busy, and a reduction keeps the ranks together."""

    def __init__(self) -> None:
        self._left, self._right = torch.randn(384, 384), torch.randn(384, 384)
        self._sum = torch.zeros(2)

    def step(self) -> float:
        began = time.perf_counter()
        for _ in range(8):
            torch.mm(self._left, self._right)
        dist.all_reduce(self._sum)
        return time.perf_counter() - began


def _rank(rank: int, folder: Path, size: int, pairs: int, window: float, dcp: bool) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=FileStore(str(folder / "store"), RANKS), rank=rank, world_size=RANKS)
    job = folder / "job"
    attempt = job / "attempt-1"
    attempt.mkdir(parents=True, exist_ok=True)
    world = distributed.World(rank, RANKS, torch.device("cpu"))
    cadence = Cadence(0, Mtbf(HOUR, "config"))
    checkpoints = Checkpoints(
        job,
        attempt,
        world,
        SaveOptions(generation=1, retention=Retention(last=1), cadence=cadence),
        reporter=NullReporter(),
    )
    checkpoints.start_from(None)
    dist.barrier()
    torch.manual_seed(0)
    elements = size * 2**20 // 4 // TENSORS
    state = {"model": {f"blocks.{index}": torch.randn(elements) for index in range(TENSORS)}}
    found = _pairs(Trial(folder, checkpoints, cadence, state, SavedWork()), pairs, window, dcp=dcp)
    if rank == 0:
        (folder / "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


class Trial:
    """Trains one rank, and saves in two ways."""

    def __init__(
        self, folder: Path, checkpoints: Checkpoints, cadence: Cadence, state: dict[str, Any], work: SavedWork
    ) -> None:
        self.folder, self.checkpoints, self.cadence, self.state, self.work = folder, checkpoints, cadence, state, work
        self.saved = 0

    def quiet(self, steps: int) -> float:
        """Return the seconds of this many steps while nothing is written."""
        began = time.perf_counter()
        for _ in range(steps):
            self.cadence.note_step(self.work.step(), saving=False)
        return time.perf_counter() - began

    def dcp(self) -> float:
        """Return how long torch's `dcp.save` stalls training."""
        target = self.folder / f"dcp-{self.saved}"
        dist.barrier()
        began = time.perf_counter()
        dcp_save(self.state, checkpoint_id=target)
        seconds = time.perf_counter() - began
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(target)
        return seconds

    def ours(self, steps: int) -> tuple[float, dict[str, Any]]:
        """Return the seconds of this many steps, or of those that the save takes, and our cadence's measurements."""
        self.saved += 1
        facts = ManifestFields(step=self.saved, consumed_samples=0, layout={}, config_hash="", config={}, data="")
        began = time.perf_counter()
        self.checkpoints.save(self.state, facts)
        stall = time.perf_counter() - began
        busy, done = torch.ones(1), 0
        while done < steps or busy:
            took = self.work.step()
            done += 1
            if busy:  # some rank was writing when the step began
                self.cadence.note_step(took, saving=True)
                busy[0] = self.checkpoints.is_saving
                dist.all_reduce(busy, op=dist.ReduceOp.MAX)
        seconds = time.perf_counter() - began
        flight = self.checkpoints._in_flight
        assert flight is not None
        assert flight.committed is not None, flight.error
        write = flight.committed.seconds
        assert self.cadence.note_written(stall=stall, write=write) is not None
        flight.waited = True  # it is told already
        self.checkpoints.process_ended_save()
        cost = self.cadence.state_dict()["costs"][-1]
        return seconds, {"stall": stall, "write": write, "cost": cost, "steps": float(done)}


def _pairs(trial: Trial, pairs: int, window: float, *, dcp: bool) -> dict[str, Any]:
    step = trial.quiet(QUIET_STEPS) / QUIET_STEPS
    agreed = torch.tensor([step])
    dist.broadcast(agreed, src=0)
    steps = max(20, int(window / float(agreed)))
    before = _resident()
    trial.checkpoints.prepare(trial.state)
    if dcp:
        trial.dcp()
    first = trial.ours(steps)[1]["stall"]
    found: dict[str, list[float]] = {name: [] for name in ("dcp", "stall", "write", "cost", "steps", "clock")}
    for _ in range(pairs):
        alone = trial.quiet(steps)
        if dcp:
            found["dcp"].append(trial.dcp())
        with_save, costs = trial.ours(steps)
        for name, value in costs.items():
            found[name].append(value)
        # The machine drifts: the steps alone are taken before and after, and the mean counts.
        alone = (alone + trial.quiet(steps)) / 2
        found["clock"].append(with_save - alone * costs["steps"] / steps)
    return {
        **found,
        "step": float(agreed),
        "first": first,
        "staged": trial.checkpoints.staging.bytes,
        "resident": (before, _resident()),
    }


def _resident() -> int:
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
