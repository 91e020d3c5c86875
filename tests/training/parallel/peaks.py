"""Measure the peak memory that a rank really takes for a step, as torch's allocator reports it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def measure(folder: Path, table: dict[str, Any], world: int, rank: int) -> None:
    """Write <rank>.json with the measured and the estimated peak, in bytes; runs in a separate process."""
    import numpy as np
    import torch
    import torch.distributed as dist
    from torch.profiler import ProfilerActivity, profile, record_function

    from training.config import run_config
    from training.data import Task
    from training.engine.composing import ComposedModel
    from training.models.llama import Llama, initialise
    from training.planning.layouts import estimate_of
    from training.recipes import language
    from training.runtime.distributed import World
    from training.step.arithmetic import MicroBatch
    from training.step.norms import GradientNorm

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), world), rank=rank, world_size=world)
    settings = run_config.parse(table)
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
        composed = ComposedModel(task, settings, World(rank, world, torch.device("cpu")))
        optimizer = composed.optimizer()
        norm = GradientNorm(optimizer.parameters, composed.shape)
        micro = settings.micro_batch or composed.micro_batch
        count = settings.global_batch // composed.shape.coordinates // micro
        for step in range(2 if world == 1 else 3):
            with record_function(f"step {step}"):
                item = composed.divide(task.batch("train", np.arange(micro)))
                composed.forward_backward([MicroBatch(item, 1 / count, 1 / count, 1)] * count)
                norm()
                optimizer.step(1e-3)
                optimizer.zero_grad()
    trace = folder / f"trace.{rank}.json"
    profiled.export_chrome_trace(str(trace))
    events = json.loads(trace.read_text())["traceEvents"]
    measured = _peak(events)
    estimate = estimate_of(settings, composed.shape, micro)
    assert estimate is not None
    (folder / f"{rank}.json").write_text(json.dumps({"measured": measured, "estimated": estimate.total}))
    dist.destroy_process_group()


def _peak(events: list[dict[str, Any]]) -> int:
    """Return the lowest peak of any step after the first: every step needs as much.

    A thread of gloo that has to wait for a core keeps what it has sent, which adds to one step memory that none needs.
    """
    reports = [(event["ts"], event["args"]["Total Allocated"]) for event in events if event.get("name") == "[memory]"]
    later = [event for event in events if event.get("name") in ("step 1", "step 2")]
    spans = [(event["ts"], event["ts"] + event["dur"]) for event in later if event.get("ph") == "X"]
    return min(max(bytes_ for at, bytes_ in reports if began <= at <= ended) for began, ended in spans)
