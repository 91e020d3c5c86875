"""Allocate a model that has no memory yet and set its weights: as stored on disk, or derived from the run's seed.

A parameter's numbers follow from the seed and its name in the whole model, so they are the same on every layout.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

from training.data import Task
from training.runtime.seeds import derive_seed


def fill(task: Task, seed: int, device: torch.device) -> None:
    """Fill the whole model on one device. A model that comes with weights is left as it is."""
    if task.initialise is None:
        return
    tied = tied_parameters(task.model)
    allocate(task.model, device)
    tie(task.model, tied)
    for name, parameter in task.model.named_parameters():
        with torch.no_grad():
            parameter.copy_(whole_parameter(task, seed, name, parameter, device))


def whole_parameter(task: Task, seed: int, name: str, like: Tensor, device: torch.device) -> Tensor:
    """Return the whole parameter: as stored on disk, mapped and not yet read, or derived from the seed."""
    assert task.initialise is not None
    if task.weights is not None and (stored := task.weights(name)) is not None:
        return stored
    generator = torch.Generator(device).manual_seed(_seed_of(seed, name))
    whole = torch.empty(like.shape, dtype=like.dtype, device=device)
    task.initialise(name, whole, generator)
    return whole


def tied_parameters(model: nn.Module) -> dict[str, str]:
    """Map the name of each parameter that is shared to the first name of the same parameter."""
    first: dict[nn.Parameter, str] = {}
    parameters = model.named_parameters(remove_duplicate=False)
    return {name: original for name, parameter in parameters if (original := first.setdefault(parameter, name)) != name}


def allocate(part: nn.Module, device: torch.device | str) -> None:
    """Allocate uninitialised memory for everything on the meta device."""
    if any(hasattr(parameter, "to_local") for parameter in part.parameters()):
        part.to_empty(device=device)
        return
    # torch's to_empty makes each tensor like one on meta, which imports sympy and takes a third of a second.
    empty = {
        name: torch.empty(tensor.shape, dtype=tensor.dtype, device=device) for name, tensor in part.state_dict().items()
    }
    part.load_state_dict(empty, assign=True)


def tie(part: nn.Module, tied: dict[str, str]) -> None:
    """Share parameters again: wrapping and allocation have made separate ones."""
    for name, other in tied.items():
        module, _, attribute = name.rpartition(".")
        setattr(part.get_submodule(module), attribute, part.get_parameter(other))


def _seed_of(seed: int, name: str) -> int:
    number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
    return derive_seed(seed, number)
