"""Measure our training loop: CPU time per step around a no-op model, reporting on, and one A/B against a bare loop.

    python -m bench.loop

Bar: at most 12.5 times the CPU time of the bare loop beside it (all threads, the reporter's included).
"""

from __future__ import annotations

import contextlib
import io
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import torch
import torch.distributed as dist

import training.recipes
from bench import stage
from training.attempt import workspace
from training.attempt.heartbeat import Heartbeat
from training.attempt.stopping import StopRequest
from training.config import run_config
from training.loop import LoopServices
from training.reporting.reporter import Reporter
from training.runtime import distributed
from training.step.determinism import set_determinism
from training.step.optimizer import AdamW
from training.trainer import Trainer

STEPS = 3000
PAIRS = 7
BAR_RATIO = 12.5
"""To the bare loop's CPU time: 6.8 to 9.5 on machines that differ four times in speed."""

NOOP = '''
"""Nothing to compute: one parameter, whose loss is itself."""
import torch
from training.data import Prepared, Task

def prepare(cache, identity=None):
    return Prepared(cache, "nothing")

def build(data):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.parameter = torch.nn.Parameter(torch.ones(()))
        def forward(self, batch):
            return self.parameter * 1.0
    nothing = (torch.zeros(1),)
    loss = lambda model, batch: model(batch[0])
    return Task(
        model=Model(), samples={"train": 1_000_000, "validation": 1}, batch=lambda split, ids: nothing,
        loss=loss, score=lambda model, batch: {"loss": loss(model, batch)},
    )
'''


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        recipes = Path(folder, "recipes")
        recipes.mkdir()
        (recipes / "noop.py").write_text(NOOP)
        training.recipes.__path__.append(str(recipes))
        set_determinism("bitwise")
        world = distributed.join(on_cpu=True)
        try:
            ours_of, bare_of = [], []
            _bare(300)
            for pair in range(PAIRS + 1):
                ours = _ours(Path(folder, f"run-{pair}"), world)
                bare = _bare(STEPS)
                if pair:  # the first pair warms up
                    ours_of.append(ours)
                    bare_of.append(bare)
        finally:
            dist.destroy_process_group()
    return _print_result(ours_of, bare_of)


def _ours(run_dir: Path, world: distributed.World) -> tuple[float, float]:
    """Return the CPU and wall microseconds per step of the whole loop, from data order and heartbeat to the spool."""
    settings = run_config.parse(
        {
            "recipe": "noop",
            "steps": STEPS,
            "global_batch": 32,
            "validate_every": 0,
            "checkpoint_every": 0,
            "sample_seconds": 0.1,
        }
    )
    where = workspace.create_standalone(run_dir)
    reporter = Reporter(where.attempt_dir, rank=0, incarnation=0)
    stop = StopRequest()
    stop.watch(where.attempt_dir)
    heartbeat = Heartbeat.open(where.attempt_dir, rank=0, incarnation=0)
    trainer = Trainer(settings, where, world, LoopServices(reporter, heartbeat, stop))
    trainer.checkpoints.start_from(None)
    with contextlib.redirect_stdout(io.StringIO()):
        trainer._prepare(None)
        cpu, wall = time.process_time(), time.perf_counter()
        while trainer.step < STEPS:
            trainer._between_steps(trainer._run_step())
        reporter.flush(wait=10)
        spent = time.process_time() - cpu, time.perf_counter() - wall
    reporter.close()
    return spent[0] / STEPS * 1e6, spent[1] / STEPS * 1e6


def _bare(steps: int) -> tuple[float, float]:
    """Return the same of the same model and optimizer in the shortest loop that one would write."""
    parameter = torch.nn.Parameter(torch.ones(()))
    optimizer = AdamW([("parameter", parameter)], weight_decay=0.1)
    losses = []
    cpu, wall = time.process_time(), time.perf_counter()
    for _ in range(steps):
        loss = parameter * 1.0
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step(1e-3)
        optimizer.zero_grad()
        losses.append(loss.detach())
    return (time.process_time() - cpu) / steps * 1e6, (time.perf_counter() - wall) / steps * 1e6


def _print_result(ours: list[tuple[float, float]], bare: list[tuple[float, float]]) -> int:
    added = [our[0] - bare_pair[0] for our, bare_pair in zip(ours, bare, strict=True)]
    ratios = [our[0] / bare_pair[0] for our, bare_pair in zip(ours, bare, strict=True)]
    print(f"loop around a no-op model, {STEPS} steps, 1 rank, reporting on; {PAIRS} pairs A/B/A/B in one process")
    print(f"  ours   CPU µs/step: {_row([pair[0] for pair in ours])}   wall: {_row([pair[1] for pair in ours])}")
    print(f"  bare   CPU µs/step: {_row([pair[0] for pair in bare])}   wall: {_row([pair[1] for pair in bare])}")
    print(f"  ratios ours/bare:   {' '.join(f'{ratio:.2f}' for ratio in ratios)}")
    print(f"  added  CPU µs/step: median {statistics.median(added):.0f}, interval {min(added):.0f} to {max(added):.0f}")
    ratio = statistics.median(ratios)
    bars = {"cpu": stage.bar("times the bare loop's CPU", ratio, BAR_RATIO, at_least=False, unit="×")}
    return stage.result("loop", bars=bars, ratio=ratio, added_us=statistics.median(added))


def _row(values: list[float]) -> str:
    return f"{statistics.median(values):.0f} ({min(values):.0f}–{max(values):.0f})"


if __name__ == "__main__":
    sys.exit(main())
