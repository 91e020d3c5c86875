"""Train a tiny model and break as instructed: the program that a game day runs on nodes (`jobs.gameday`).

    python gameday.py FAULT

Two ranks or more train on CPUs over gloo, a tenth of a second per step, and save every tenth step. In the first attempt
the last rank breaks at step 35 in the given way; a later attempt continues from the checkpoint and trains to the end.
Losses depend on the seed alone, so an attempt that continued correctly reports the same ones as an undisturbed run. The
times of the fault and of the first step after it are written into the attempt's folder.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import vigil_report

STEPS, FAULT_STEP, SAVE_EVERY, STEP_S = 60, 35, 10, 0.1
COLLECTIVE_TIMEOUT = timedelta(seconds=15)
"""How long a rank waits for a peer that has stopped; gloo's own limit is half an hour."""
WIDTH, SAMPLES, LEARNING_RATE = 16, 8, 0.05
RECORD = "game-day.json"


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def exception() -> None:
    batch = {"image": torch.ones(1)}
    batch["label"].sum()


def disk() -> None:
    """Write where the kernel answers that no space is left, so that nobody's disk is filled."""
    with open("/dev/full", "wb", buffering=0) as scratch:
        scratch.write(bytes(4096))


def network() -> None:
    """Reset every TCP connection of this process, as a network that fails does: to no address means to disconnect."""
    libc, no_address = ctypes.CDLL(None), bytes(16)  # of the family AF_UNSPEC
    for entry in os.listdir("/proc/self/fd"):
        with suppress(OSError), socket.socket(fileno=os.dup(int(entry))) as connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6):
                connection.getpeername()  # else it only listens
                libc.connect(connection.fileno(), no_address, len(no_address))


FAULTS: dict[str, Callable[[], None]] = {
    "kill": kill, "stop": stop, "exception": exception, "disk": disk, "network": network,
}  # fmt: skip


def main() -> None:
    fault = sys.argv[1]
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    is_first_attempt = os.environ["TORCHELASTIC_RUN_ID"].partition(".")[0] == "1"
    breaks = is_first_attempt and fault in FAULTS and rank == world_size - 1
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=COLLECTIVE_TIMEOUT)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, 1))
    first = load(model) + 1
    for step in range(first, STEPS + 1):
        if breaks and step == FAULT_STEP:
            record("planted_at")
            FAULTS[fault]()
        loss = train(model, step, rank, world_size)
        if rank == 0:
            if step == first and not is_first_attempt:
                record("training_at")
            report(model, step, loss)
        time.sleep(STEP_S)
    vigil_report.finished()


def load(model: torch.nn.Module) -> int:
    """Load the checkpoint to continue from; return its step, or 0."""
    path = vigil_report.resume_path()
    if path is None:
        return 0
    saved = torch.load(path, weights_only=True)
    model.load_state_dict(saved["model"])
    return int(saved["step"])


def train(model: torch.nn.Module, step: int, rank: int, world_size: int) -> float:
    """Make one step on this rank's samples; return the mean loss of all ranks."""
    samples = torch.Generator().manual_seed(step * world_size + rank)
    inputs = torch.randn(SAMPLES, WIDTH, generator=samples)
    loss = torch.nn.functional.mse_loss(model(inputs), inputs.sum(dim=1, keepdim=True).tanh())
    model.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    total = loss.detach().clone()
    dist.all_reduce(total)
    with torch.no_grad():
        for weights in model.parameters():
            assert weights.grad is not None
            dist.all_reduce(weights.grad)
            weights.sub_(weights.grad, alpha=LEARNING_RATE / world_size)
    return float(total) / world_size


def report(model: torch.nn.Module, step: int, loss: float) -> None:
    vigil_report.log(step, loss=loss)
    vigil_report.progress(step, STEPS)
    if step % SAVE_EVERY == 0:
        path = Path(os.environ["VIGIL_ATTEMPT_DIR"]) / "model.pt"
        torch.save({"step": step, "model": model.state_dict()}, path)
        vigil_report.checkpoint(path, step)


def record(what: str) -> None:
    """Write the time of the fault, or of the first step after it, where the portal reads it."""
    path = Path(os.environ["VIGIL_ATTEMPT_DIR"]) / RECORD
    temporary = path.with_suffix(".new")
    temporary.write_text(json.dumps({what: time.time()}))
    temporary.replace(path)


if __name__ == "__main__":
    main()
