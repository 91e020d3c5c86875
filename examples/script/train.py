"""Somebody's own training script: two spirals, a small network, DistributedDataParallel as under torchrun.

It runs by itself (`python train.py`), under torchrun, and as a Vigil job (`vigil submit examples/script/job.toml`),
where `vigil_report` brings live curves, checkpoints, a progress bar and a clean stop. Elsewhere those calls do nothing.
"""

import argparse
import math
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

try:
    import vigil_report
except ImportError:  # not a Vigil job, and not installed
    vigil_report = None


def spirals(count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Points of two spirals, [count, 2], and which one each is from, [count]."""
    label = torch.randint(0, 2, (count,), generator=generator)
    turn = torch.rand(count, generator=generator) * 3 * math.pi + 0.5
    angle = turn + label * math.pi
    noise = torch.randn(count, 2, generator=generator) * 0.15
    return torch.stack([turn * angle.cos(), turn * angle.sin()], dim=1) / 5 + noise / 5, label


def save(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, path)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    options = parser.parse_args()

    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    layers = [nn.Linear(2, options.width), nn.Tanh(), nn.Linear(options.width, options.width), nn.Tanh()]
    plain = nn.Sequential(*layers, nn.Linear(options.width, 2))
    model = DistributedDataParallel(plain) if world > 1 else plain
    optimizer = torch.optim.Adam(plain.parameters(), lr=options.learning_rate)

    first = 0
    if vigil_report and (path := vigil_report.resume_path()):
        state = torch.load(path)
        plain.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
        print(f"resumed at step {first}", flush=True)

    held_out = spirals(2000, torch.Generator().manual_seed(10**6))
    with tempfile.TemporaryDirectory() as scratch:
        for step in range(first + 1, options.steps + 1):
            # Every rank draws its own points, a function of step and rank: a resumed run sees the same ones.
            points, label = spirals(128, torch.Generator().manual_seed(step * world + rank))
            loss = nn.functional.cross_entropy(model(points), label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

            if vigil_report:
                vigil_report.log(step, loss=loss.item())
            if step % 100 == 0 and rank == 0:
                with torch.no_grad():
                    accuracy = (plain(held_out[0]).argmax(1) == held_out[1]).float().mean().item()
                print(f"step {step}  loss {loss.item():.4f}  accuracy {accuracy:.3f}", flush=True)
                if vigil_report:
                    vigil_report.log(step, validation_accuracy=accuracy)
                    vigil_report.progress(step, options.steps)

            stopping = torch.tensor(int(bool(vigil_report and vigil_report.stopping())))
            if world > 1 and step % 10 == 0:
                dist.all_reduce(stopping)  # one rank may have heard of it before another
            stop_now = bool(stopping) and (world == 1 or step % 10 == 0)
            if vigil_report and rank == 0 and (step % 500 == 0 or stop_now):
                file = Path(scratch) / "spirals.pt"
                save(file, plain, optimizer, step)
                vigil_report.checkpoint(file, step, consumed_samples=step * 128 * world)
            if stop_now:
                break
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
