"""Ranks that save and load a made-up state in a given layout: no model, only its tensors."""

from __future__ import annotations

import hashlib
import json
import os
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SHAPES: dict[str, tuple[int, ...]] = {
    "tokens": (10, 8),
    "blocks.0.up": (12, 8),
    "blocks.1.up": (12, 8),
    "norm": (8,),
    "head": (7, 8),  # divides over nothing
}
TP_DIM = {"tokens": 1, "blocks.0.up": 0, "blocks.1.up": 0, "head": 0}


def rank(folder: Path, world: int, rank: int, acts: list[tuple[str, str, str]]) -> None:
    """Run (act, layout, job) tuples one after the other in a separate process; each writes `act.layout.job.rank.json`.

    "save": the states of steps 1 and 2. "load": the saved state, leaving digests.
    Layouts: one, dp (all alike), shard (FSDP2), tp, fsdp-tp, hsdp (replicas of shards), pp (different names per rank).
    """
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / f"{world}"), world), rank=rank, world_size=world)
    for act, layout, job in acts:
        try:
            found = _act(act, layout, folder / job, world, rank)
        except BaseException:
            found = {"error": traceback.format_exc()}
        (folder / f"{act}.{layout}.{job}.{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def _act(act: str, layout: str, job: Path, world: int, rank: int) -> dict[str, Any]:
    import torch

    from training import manifest
    from training.checkpoint.cadence import Cadence, Mtbf
    from training.checkpoint.pruning import Retention
    from training.checkpoint.saving import Checkpoints
    from training.checkpoint.writing import ManifestFields, SaveOptions
    from training.reporting.reporter import NullReporter
    from training.runtime import distributed

    checkpoints = Checkpoints(
        job,
        job / "attempt-1",
        distributed.World(rank, world, torch.device("cpu")),
        SaveOptions(generation=1, retention=Retention(last=5), cadence=Cadence(0, Mtbf(3600, "assumed"))),
        reporter=NullReporter(),
    )
    found: dict[str, Any] = {}
    state = make(layout, world, 0)
    if act == "load":
        checkpoints.restore(state, manifest.check(job / "checkpoints" / "step-2"))
        return {"digest": digest(state)}
    checkpoints.start_from(None)
    for step in (1, 2):
        state = make(layout, world, step)
        found["digest"] = digest(state)
        facts = ManifestFields(step=step, consumed_samples=0, layout={}, config_hash="", config={}, data="")
        checkpoints.save(state, facts)
        _spoil(state)  # what training does meanwhile must not reach the copy
        checkpoints.wait()
        found[f"bytes {step}"] = checkpoints.staging.bytes
    return found


def make(layout: str, world: int, step: int) -> dict[str, Any]:
    """Return the state of a step: every layout holds the same full tensors; step 0 is all zeros."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh

    def whole(name: str, salt: int) -> torch.Tensor:
        shape = SHAPES[name]
        seed = int(hashlib.sha256(f"{name} {salt}".encode()).hexdigest()[:8], 16)
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * step

    rank = torch.distributed.get_rank()
    names = list(SHAPES)[rank::world] if layout == "pp" else list(SHAPES)
    place = {
        "shard": lambda whole: _placed(whole, init_device_mesh("cpu", (world,), mesh_dim_names=("shard",))),
        "tp": lambda whole: _placed(whole, init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))),
        "hsdp": lambda whole: _placed(whole, init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "shard"))),
        "fsdp-tp": lambda whole: _fully_sharded(whole, world),
    }.get(layout, lambda whole: whole)
    model, means = (place({name: whole(name, salt) for name in names}) for salt in (0, 1))
    optimizer = {"steps": torch.full((), float(step)), "means": means}
    return {"model": model, "optimizer": optimizer, "comm": {"errors": torch.full((world,), 1.0)}}


def _placed(whole: dict[str, Any], mesh: Any) -> dict[str, Any]:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    def along(axis: str, name: str) -> Any:
        if axis == "shard":
            return Shard(0)
        return Shard(TP_DIM[name]) if axis == "tp" and name in TP_DIM else Replicate()

    return {
        name: distribute_tensor(tensor, mesh, [along(axis, name) for axis in mesh.mesh_dim_names])
        for name, tensor in whole.items()
    }


def _fully_sharded(whole: dict[str, Any], world: int) -> dict[str, Any]:
    """Shard like torch's FSDP2 what tensor parallelism has sharded: along one dim, in strides."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("shard", "tp"))
    module = torch.nn.Module()
    for name, tensor in _placed(whole, mesh["tp"]).items():
        module.register_parameter(name.replace(".", "_"), torch.nn.Parameter(tensor))
    fully_shard(module, mesh=mesh["shard"])
    return {name: module.state_dict()[name.replace(".", "_")] for name in whole}


def digest(state: Mapping[str, Any]) -> dict[str, str]:
    """Return the digest of every full tensor that this rank has, by name."""
    from training.checkpoint.staging import walk

    found = {}
    for path, tensor in walk(state):
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        found[".".join(path)] = hashlib.sha256(whole.contiguous().numpy().tobytes()).hexdigest()
    return found


def _spoil(state: Mapping[str, Any]) -> None:
    from training.checkpoint.staging import walk

    for _, tensor in walk(state):
        (tensor.to_local() if hasattr(tensor, "to_local") else tensor).fill_(9e9)
