"""The most memory that a rank really takes for two steps, as torch's own allocator tells."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def measure(folder: Path, table: dict[str, Any], world: int, rank: int) -> None:
    """In a process of its own: leaves <rank>.json with the measured and the estimated peak, in bytes."""
    import numpy as np
    import torch
    import torch.distributed as dist
    from torch.profiler import ProfilerActivity, profile

    from training import config
    from training.data import Task
    from training.distributed import World
    from training.engine.composing import Composed
    from training.models.llama import Llama, initialise
    from training.planning.plan import estimate_of
    from training.recipes import language
    from training.step.arithmetic import MicroBatch
    from training.step.norms import GradientNorm

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), world), rank=rank, world_size=world)
    settings = config.parse(table)
    sizes = language.dims(**settings.recipe_options())

    def batch(split: str, ids: Any) -> tuple[torch.Tensor, ...]:
        windows = torch.zeros(len(ids), sizes.context + 1, dtype=torch.long)
        return windows[:, :-1], windows[:, 1:]

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        with torch.device("meta"):
            model = Llama(sizes)
        task = Task(
            model=model,
            initialise=lambda *of: initialise(sizes, *of),
            samples={"train": 1000, "validation": 10},
            batch=batch,
            loss=language._loss,
            score=lambda model, batch: {},
            inputs=lambda batch: batch[0],
            dims=sizes,
        )
        composed = Composed(task, settings, World(rank, world, torch.device("cpu")))
        optimizer = composed.optimizer()
        norm = GradientNorm(optimizer.parameters, composed.shape)
        micro = settings.micro_batch or composed.micro_batch
        count = settings.global_batch // composed.shape.coordinates // micro
        for _ in range(2):
            one = composed.divide(task.batch("train", np.arange(micro)))
            composed.forward_backward([MicroBatch(one, 1 / count, 1 / count, 1)] * count)
            norm()
            optimizer.step(1e-3)
            optimizer.zero_grad()
    trace = folder / f"trace.{rank}.json"
    profiled.export_chrome_trace(str(trace))
    events = json.loads(trace.read_text())["traceEvents"]
    measured = max(event["args"]["Total Allocated"] for event in events if event.get("name") == "[memory]")
    estimate = estimate_of(settings, composed.shape, micro)
    assert estimate is not None
    (folder / f"{rank}.json").write_text(json.dumps({"measured": measured, "estimated": estimate.total}))
    dist.destroy_process_group()
